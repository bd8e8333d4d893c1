"""Attention of a decode step: all between the projection to queries, keys and values and the one back."""

from pallas_kernels.decode_attention.api import decode_attention as decode_attention
from pallas_kernels.decode_attention.config import DecodeAttentionConfig as DecodeAttentionConfig
from pallas_kernels.decode_attention.config import Heads as Heads
from pallas_kernels.decode_attention.config import unfit_heads as unfit_heads
