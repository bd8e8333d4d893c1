"""`matvec` with Pallas's Mosaic GPU lowering: one bf16 vector, no norm, bias or residual; not used by the model.

See `pallas_kernels.mosaic` for what it covers and why it is here.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16

from pallas_kernels import mosaic


def matvec(
    x: BFloat16[Array, " I"], w: BFloat16[Array, "O I"], *, rows: int = 8, interpret: Any = None
) -> BFloat16[Array, " O"]:
    """`W x`, summed in float32; a program makes `rows` outputs, and asks for all its bytes at once.

    I is a multiple of 256, O of `rows`, and `rows` of 4.
    """
    outputs, width = w.shape
    if width % mosaic.SPAN or rows % mosaic.WARPS or outputs % rows:
        raise ValueError(
            f"matvec: expected W[O, I] with I a multiple of {mosaic.SPAN}, O of rows and rows of {mosaic.WARPS}, "
            f"got W{list(w.shape)} and rows={rows}"
        )
    return plgpu.kernel(
        _kernel,
        out_type=jax.ShapeDtypeStruct((outputs,), x.dtype),
        grid=(outputs // rows,),
        grid_names=("program",),
        scratch_types=[plgpu.SMEM((rows, width), w.dtype), plgpu.Barrier()],
        compiler_params=mosaic.PARAMS,
        interpret=interpret,
        kernel_name="matvec_mosaic",
    )(x, w)


def _kernel(x_ref: Any, w_ref: Any, out_ref: Any, rows_ref: Any, barrier: Any) -> None:
    rows = rows_ref.shape[0]
    here = pl.ds(jax.lax.axis_index("program") * rows, rows)
    mosaic.copy_rows(w_ref.at[here], rows_ref, barrier)
    vector = mosaic.load_vector(x_ref)
    plgpu.barrier_wait(barrier)
    mosaic.store(out_ref.at[here], mosaic.products(mosaic.load_rows(rows_ref), vector).astype(out_ref.dtype))
