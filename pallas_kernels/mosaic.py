"""What the kernels with Pallas's Mosaic GPU lowering share: rows of a matrix copied whole, multiplied and summed.

For Hopper and newer. **The model does not use them**: the Triton lowering is faster for a decode step's experts, Mosaic
for its projections alone (docs/benchmarks.md, "Both lowerings for GPUs"). They are kept working as the ground to build
on where Pallas's Triton lowering ends. They take bf16 whose rows are multiples of 256 elements; norms, residuals,
biases, FP8 and MXFP4 are not written. `matvec.mosaic` is of one vector, `fused_moe.mosaic` was timed at batch 1.

A program is a warpgroup of four warps; a warp has a row, a lane eight neighbouring elements of every 256. Rows lie next
to each other in memory, so that all of a program's are one bulk copy into shared memory, without a tensor map; it lands
as it is read, without bank conflicts. A row is summed within its warp.
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

# JAX 0.10 wants an index as well.
_load: Any = functools.partial(plgpu.load, idx=()) if jax.__version_info__ < (0, 11) else plgpu.load


def copy_rows(source: Ref, target: Ref, barrier: Ref) -> None:
    """Starts the copy of neighbouring rows into shared memory."""
    plgpu.copy_gmem_to_smem(source, target, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def load_vector(ref: Ref) -> list[BFloat16[Array, " 256"]]:
    """A vector in global memory, in pieces."""
    return [_load(ref.at[span], layout=COLUMNS, optimized=False) for span in _spans(ref.shape[-1])]


def load_rows(ref: Ref) -> list[BFloat16[Array, "rows 256"]]:
    """Rows in shared memory, in pieces; bf16 also where they are stored as integers."""
    pieces = [_load(ref.at[:, span], layout=TILE) for span in _spans(ref.shape[-1])]
    return [jax.lax.bitcast_convert_type(piece, jnp.bfloat16) for piece in pieces]


def products(rows: list[BFloat16[Array, "rows 256"]], vector: list[BFloat16[Array, " 256"]]) -> Float32[Array, " rows"]:
    """Rows times vector: element by element along the pieces first, then across lanes once."""
    parts = [
        tile.astype(jnp.float32)
        * plgpu.layout_cast(jax.lax.broadcast_in_dim(piece.astype(jnp.float32), tile.shape, (1,)), TILE)
        for tile, piece in zip(rows, vector, strict=True)
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
