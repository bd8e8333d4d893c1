"""`miss_load` in plain XLA: the oracle of the kernels, and what runs on CPU and older GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def miss_load(
    slots: Shaped[Array, "S n"],
    pool: Shaped[Array, "E n"],
    experts: Int[Array, " M"],
    dst: Int[Array, " M"],
) -> Shaped[Array, "S n"]:
    """See `miss_load.api`. One iteration per missing expert; each moves one row across the memory spaces."""

    def load(i: Int[Array, ""], slots: Shaped[Array, "S n"]) -> Shaped[Array, "S n"]:
        # Slice first, then move: XLA turns this into an asynchronous copy of that row alone.
        row = jax.lax.dynamic_index_in_dim(pool, experts[i], keepdims=False)
        row = jax.device_put(row, jax.memory.Space.Device)
        return jax.lax.dynamic_update_index_in_dim(slots, row, dst[i], axis=0)

    return jax.lax.fori_loop(0, (dst >= 0).sum(dtype=jnp.int32), load, slots)
