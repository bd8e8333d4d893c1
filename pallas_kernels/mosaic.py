"""What the kernels with Pallas's Mosaic GPU lowering share: rows of a matrix copied whole, multiplied and summed.

For Hopper and newer. A program is a warpgroup of four warps; a warp has a row, a lane eight neighbouring elements of
every 256. Rows lie next to each other in memory, so a tile of them is one bulk copy into shared memory, without a
tensor map; it lands as it is read, without bank conflicts. A row is summed within its warp.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32

Ref = Any  # Pallas has no public type for references.
WARPS, SPAN = 4, 256  # rows and columns that a warpgroup reads with one load of 16 bytes a thread
TILE = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, SPAN), (8,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
COLUMNS = TILE.reduce(0)  # of a vector that meets a tile: every warp has it

# The other semantics would have tiles swizzled, and copied by tensor map. No program writes memory that it reads
# itself, so none needs the barriers that would be put around every store.
PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)
TENSOR_MAPS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)


# JAX 0.10 wants an index as well.
_load: Any = functools.partial(plgpu.load, idx=()) if jax.__version_info__ < (0, 11) else plgpu.load


def copy_rows(source: Ref, target: Ref, barrier: Ref) -> None:
    """Starts the copy of neighbouring rows into shared memory."""
    plgpu.copy_gmem_to_smem(source, target, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def load_vector(ref: Ref) -> list[BFloat16[Array, " 256"]]:
    """A vector in global memory, in pieces."""
    return [_load(ref.at[span], layout=COLUMNS, optimized=False) for span in _spans(ref.shape[-1])]


def load_rows(ref: Ref, *, shared: bool = True) -> list[Array]:
    """A tile in shared or in global memory, `[rows, 256]` each piece; bf16 also where it is stored as integers."""
    pieces = [_load(ref.at[:, span], layout=TILE, optimized=shared) for span in _spans(ref.shape[-1])]
    return [jax.lax.bitcast_convert_type(piece, jnp.bfloat16) for piece in pieces]


def products(tile: list[BFloat16[Array, "rows 256"]], vector: list[BFloat16[Array, " 256"]]) -> Float32[Array, " rows"]:
    """Rows times vector: element by element along the pieces first, then across lanes once."""
    parts = [
        rows.astype(jnp.float32)
        * plgpu.layout_cast(jax.lax.broadcast_in_dim(piece.astype(jnp.float32), rows.shape, (1,)), TILE)
        for rows, piece in zip(tile, vector, strict=True)
    ]
    return jnp.sum(functools.reduce(jnp.add, parts), axis=1)


def store(ref: Ref, value: Array) -> None:
    """To global memory: a few values from a few lanes, of which there is nothing to optimise."""
    if hasattr(plgpu, "store"):  # JAX 0.12, which wants to be told
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def _spans(width: int) -> list[Any]:
    return [pl.ds(start, SPAN) for start in range(0, width, SPAN)]
