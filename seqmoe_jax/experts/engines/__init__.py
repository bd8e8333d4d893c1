"""Transfer engines: what moves experts ahead of their use. One interface (`base`), several implementations."""

from __future__ import annotations

import jax
from jaxtyping import Array, Shaped

from seqmoe_jax.experts.engines.base import EngineConfig, TransferEngine


def make_engine(
    name: str, pools: tuple[Shaped[Array, "E n"], ...], device: jax.Device, config: EngineConfig
) -> TransferEngine:
    """The engine of a name that `resolve_engine` gave; not "none"."""
    if name == "dma":
        from seqmoe_jax.experts.engines.dma import Dma  # imports numba

        return Dma(pools, device, config)
    from seqmoe_jax.experts.engines.device_put import DevicePut

    return DevicePut(pools, device, config, callback=name == "callback")
