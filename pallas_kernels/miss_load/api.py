"""On-demand loading: the device itself copies missing experts out of host memory (paper 8.2)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pallas_kernels.backend import Implementation, resolve
from pallas_kernels.miss_load import reference
from pallas_kernels.miss_load.config import MissLoadConfig


def miss_load(
    slots: Shaped[Array, "S n"],
    pool: Shaped[Array, "E n"],
    experts: Int[Array, " M"],
    dst: Int[Array, " M"],
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
    config: MissLoadConfig | None = None,
) -> Shaped[Array, "S n"]:
    """Copy `pool[experts[i]]` to `slots[dst[i]]` wherever `dst[i] >= 0`; nothing is read if there is no such i.

    Args:
        slots: slot cache in device memory, donated by the caller's jit and written in place.
        pool: one layer's experts, normally in `pinned_host` memory, where it stays. Same dtype as `slots`.
        experts, dst: `miss_expert` and `miss_slot` of `slot_update`: valid entries first, then -1, no slot twice.
        implementation: `xla`, `gpu` or `tpu`; by default the best of this process's backend.
        interpret: run a Pallas implementation in the interpreter, on any backend.
        config: how the GPU kernel divides an expert.

    Raises `ValueError` for a pool of another dtype than the slots'.
    """
    if pool.dtype != slots.dtype:
        raise ValueError(f"pool: expected {slots.dtype} like the slots, got {pool.dtype}")
    experts, dst = experts.astype(jnp.int32), dst.astype(jnp.int32)
    match resolve(implementation):
        case "gpu":  # imported where used: Pallas is slow to import and absent from some builds
            from pallas_kernels.miss_load import gpu

            return gpu.miss_load(slots, pool, experts, dst, config=config, interpret=interpret)
        case "tpu":
            from pallas_kernels.miss_load import tpu

            return tpu.miss_load(slots, pool, experts, dst, interpret=interpret)
        case _:
            return reference.miss_load(slots, pool, experts, dst)
