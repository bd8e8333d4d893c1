"""Attention of a decode step: all between the projection to queries, keys and values and the one back.

`gpu.decode_attention`; the reference is the mixer that it serves, `seqmoe_jax.models.mixers.gqa.GQA.apply`.
"""

from pallas_kernels.decode_attention.config import DecodeAttentionConfig as DecodeAttentionConfig
from pallas_kernels.decode_attention.config import Heads as Heads
