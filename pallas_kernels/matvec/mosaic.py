"""`matvec` with Pallas's Mosaic GPU lowering, for one bf16 vector: Hopper and newer."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16

from pallas_kernels import mosaic


@dataclass(frozen=True, kw_only=True)
class Config:
    """A program makes `tiles` times `rows` outputs; all its bytes are asked for at once.

    `through` says where the matrix waits: in shared memory, copied there by the hardware, by address or by tensor map
    and swizzled, or in registers. `early` lets the next kernel begin, and reads the matrix, while the kernel before is
    still at work.
    """

    rows: int = 8
    tiles: int = 1
    through: Literal["shared", "tensor map", "registers"] = "shared"
    early: bool = False


def matvec(
    x: BFloat16[Array, " I"], w: BFloat16[Array, "O I"], *, config: Config = Config(), interpret: Any = None
) -> BFloat16[Array, " O"]:
    """`W x`, summed in float32. I is a multiple of 256, O of the rows of a program, these of 4."""
    outputs, width = w.shape
    per_program = config.rows * config.tiles
    if width % mosaic.SPAN or config.rows % mosaic.WARPS or outputs % per_program:
        raise ValueError(
            f"matvec: expected W[O, I] with I a multiple of {mosaic.SPAN} and O of {per_program}, got W{list(w.shape)}"
        )
    scratch: list[Any] = [
        plgpu.SMEM((config.tiles, config.rows, width), w.dtype),
        plgpu.Barrier(num_barriers=config.tiles),
    ]
    return plgpu.kernel(
        functools.partial(_kernel, config=config),
        out_type=jax.ShapeDtypeStruct((outputs,), x.dtype),
        grid=(outputs // per_program,),
        grid_names=("program",),
        scratch_types=scratch if config.through != "registers" else [],
        compiler_params=mosaic.TENSOR_MAPS if config.through == "tensor map" else mosaic.PARAMS,
        interpret=interpret,
        kernel_name="matvec_mosaic",
    )(x, w)


def _kernel(x_ref: Any, w_ref: Any, out_ref: Any, *scratch: Any, config: Config) -> None:
    start = jax.lax.axis_index("program") * (config.rows * config.tiles)
    rows = [pl.ds(start + config.rows * tile, config.rows) for tile in range(config.tiles)]
    if config.early:
        plgpu.griddepcontrol_launch_dependents()
    if config.through != "registers":
        tiles_ref, barriers = scratch
        for tile, where in enumerate(rows):
            mosaic.copy_rows(w_ref.at[where], tiles_ref.at[tile], barriers.at[tile])
    else:
        loaded = [mosaic.load_rows(w_ref.at[where], shared=False) for where in rows]
    if config.early:
        plgpu.griddepcontrol_wait()
    vector = mosaic.load_vector(x_ref)
    for tile, where in enumerate(rows):
        if config.through != "registers":
            plgpu.barrier_wait(barriers.at[tile])
            matrix = mosaic.load_rows(tiles_ref.at[tile])
        else:
            matrix = loaded[tile]
        mosaic.store(out_ref.at[where], mosaic.products(matrix, vector).astype(out_ref.dtype))
