"""Offloaded experts inside a Flax NNX model that stays what it is: its attention, its cache, its decode loop."""

from seqmoe_jax.nnx.block import OffloadedMoE
from seqmoe_jax.nnx.model import OffloadedLM, forward
from seqmoe_jax.nnx.offload import offload
from seqmoe_jax.nnx.sampler import Sampler, SamplerOutput
from seqmoe_jax.nnx.slots import ExpertSlots, HostExperts, SlotState

__all__ = [
    "ExpertSlots", "HostExperts", "OffloadedLM", "OffloadedMoE", "Sampler", "SamplerOutput", "SlotState", "forward",
    "offload",
]  # fmt: skip
