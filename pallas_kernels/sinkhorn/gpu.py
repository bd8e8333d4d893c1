"""`sinkhorn` for NVIDIA GPUs, Pallas with the Triton lowering: a program has one matrix, in registers throughout."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float32

from pallas_kernels.masks import Ref


def _kernel(logits_ref: Ref, out_ref: Ref, *, iterations: int, eps: float) -> None:
    def columns(c: Float32[Array, "S S"]) -> Float32[Array, "S S"]:
        return c / (jnp.sum(c, axis=0)[None, :] + eps)

    def both(_: Any, c: Float32[Array, "S S"]) -> Float32[Array, "S S"]:
        return columns(c / (jnp.sum(c, axis=1)[:, None] + eps))

    matrix = pl.program_id(0)
    logits = logits_ref[matrix]
    exponentials = jnp.exp(logits - jnp.max(logits, axis=1)[:, None])
    start = columns(exponentials / jnp.sum(exponentials, axis=1)[:, None] + eps)
    out_ref[matrix] = jax.lax.fori_loop(0, iterations - 1, both, start)


def sinkhorn(
    logits: Float32[Array, "N S S"], *, iterations: int, eps: float, interpret: bool = False
) -> Float32[Array, "N S S"]:
    """See `sinkhorn.api`."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_kernel, iterations=iterations, eps=eps),
        out_shape=jax.ShapeDtypeStruct(logits.shape, logits.dtype),
        grid=(logits.shape[0],),
        in_specs=[anywhere],
        out_specs=anywhere,
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="sinkhorn",
    )(logits)
