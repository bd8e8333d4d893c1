"""The MoE layer of a prefill, over experts in slots and tokens grouped into blocks by expert."""

from pallas_kernels.grouped_moe.api import grouped_moe as grouped_moe
from pallas_kernels.grouped_moe.blocks import assign_blocks as assign_blocks
from pallas_kernels.grouped_moe.blocks import combine as combine
from pallas_kernels.grouped_moe.config import GroupedMoEConfig as GroupedMoEConfig

__all__ = ["GroupedMoEConfig", "assign_blocks", "combine", "grouped_moe"]
