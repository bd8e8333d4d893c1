"""The MoE layer of a decode step, over experts in slots."""

from pallas_kernels.fused_moe.api import fused_moe as fused_moe
from pallas_kernels.fused_moe.api import moe_on_demand as moe_on_demand
from pallas_kernels.fused_moe.config import FusedMoEConfig as FusedMoEConfig

__all__ = ["FusedMoEConfig", "fused_moe", "moe_on_demand"]
