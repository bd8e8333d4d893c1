"""Attention of a decode step: everything between the projection to queries, keys and values and the one back.

The reference is the mixer that it serves, `seqmoe_jax.models.mixers.gqa.GQA.apply`, in plain XLA.
"""

from pallas_kernels.decode_attention.config import Config as Config
from pallas_kernels.decode_attention.config import Heads as Heads
from pallas_kernels.decode_attention.gpu import decode_attention as decode_attention
