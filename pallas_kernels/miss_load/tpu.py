"""`miss_load` for TPUs: asynchronous copies from host memory to the slots, all under way at once.

Lowered and interpreted in the tests, never timed on a TPU.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Shaped


def miss_load(
    slots: Shaped[Array, "S n"],
    pool: Shaped[Array, "E n"],
    experts: Int[Array, " M"],
    dst: Int[Array, " M"],
    *,
    interpret: bool,
) -> Shaped[Array, "S n"]:
    """See `miss_load.api`."""
    anywhere, scalars = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.SMEM)
    return pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct(slots.shape, slots.dtype),
        in_specs=[anywhere, anywhere, scalars, scalars],
        out_specs=anywhere,
        scratch_shapes=[pltpu.SemaphoreType.DMA],
        input_output_aliases={0: 0},
        interpret=interpret,
        name="miss_load",
    )(slots, pool, experts, dst)


def _kernel(_slots: Any, pool: Any, experts: Any, dst: Any, slots: Any, semaphore: Any) -> None:
    def copy(i: Array) -> Any:
        source, target = pool.at[pl.ds(experts[i], 1)], slots.at[pl.ds(dst[i], 1)]
        return pltpu.make_async_copy(source, target, semaphore)

    def is_miss(i: Array, count: Array) -> Array:
        return count + (dst[i] >= 0).astype(jnp.int32)

    num_misses = jax.lax.fori_loop(0, dst.shape[0], is_miss, jnp.int32(0))

    @pl.loop(0, num_misses)
    def _start(i: Array) -> None:
        copy(i).start()

    @pl.loop(0, num_misses)
    def _wait(i: Array) -> None:
        copy(i).wait()
