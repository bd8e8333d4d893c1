"""The public function of the decode step's projections."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.backend import Implementation, resolve
from pallas_kernels.matvec import reference
from pallas_kernels.matvec.config import MatvecConfig, Product, unfit_batch
from pallas_kernels.norm import Norm


def matvec(
    x: Float[Array, "B I"],
    w: Float[Array, "O I"],
    *,
    bias: Float[Array, " O"] | None = None,
    norm: Norm | None = None,
    norm_weight: Float[Array, " I"] | None = None,
    residual: Float[Array, "B O"] | None = None,
    residual_scale: float = 1.0,
    addend: Float32[Array, "B I"] | None = None,
    dtype: jnp.dtype | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
    config: MatvecConfig | None = None,
    name: str = "matvec",
) -> Product:
    """`residual + residual_scale * (norm(x + addend) W^T + bias)`; on GPUs in one launch.

    Args:
      x: B vectors, for the kernel at most `MAX_BATCH`; float32, bf16 or f16.
      w: rows as in checkpoints, in the dtype of `x`.
      bias: added in float32.
      norm, norm_weight: applied to `x` first; None leaves it (and it is returned as it came).
      residual: added after the sum was rounded to `dtype`, as an addition of its own would.
      addend: rounded to the dtype of `x` and added to it before everything else.
      dtype: of the result; that of `x` by default.
      implementation: `xla` or `gpu`; by default the best of this process's backend. There is none for TPUs: `tpu` means
        `xla`.
      interpret: run the kernel in the interpreter, on any backend.
      config: block shapes of the kernel; by default chosen from the matrix's shape.
      name: of the launch in profiles.

    Sums are float32; the kernel's in an order that the shape of `w` alone decides. Raises `ValueError` for vectors of
    another length than the matrix's rows, and for more of them than the kernel takes.
    """
    if x.shape[1] != w.shape[1]:
        raise ValueError(f"matvec: expected x[B, {w.shape[1]}] for w{list(w.shape)}, got x{list(x.shape)}")
    dtype = jnp.dtype(dtype or x.dtype)
    if resolve(implementation) == "gpu":
        if reason := unfit_batch(x.shape[0]):
            raise ValueError(f"matvec: {reason}")
        from pallas_kernels.matvec import gpu  # Pallas is slow to import and absent from some builds

        return gpu.matvec(
            x, w, bias=bias, norm=norm, norm_weight=norm_weight, residual=residual, residual_scale=residual_scale,
            addend=addend, dtype=dtype, config=config, name=name, interpret=interpret,
        )  # fmt: skip
    return reference.matvec(
        x, w, bias=bias, norm=norm, norm_weight=norm_weight, residual=residual, residual_scale=residual_scale,
        addend=addend, dtype=dtype,
    )  # fmt: skip
