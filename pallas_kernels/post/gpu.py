"""`post`: one small kernel that writes a vector into pinned host memory, where a thread of the host polls for it.

Reading a step's outputs instead would tell the host when the step has ended, through Python; this tells it in the
middle of the step, a microsecond after the fact. There is no TPU version: TPUs do not address host memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int, Int32


def post(
    board: Int[Array, " W"], number: Int[Array, ""], values: Int[Array, " n"], *, interpret: bool = False
) -> Int32[Array, ""]:
    """Writes `[number, *values, check]` to the start of `board`, which lies in `pinned_host` memory.

    `check` is the sum of `number` and the values (int32, wrapping): stores may arrive in any order, and a reader takes
    what adds up. Returns a zero that depends on the write: add it to something that must come later.
    """
    (n,) = values.shape
    if board.shape[0] < n + 2:
        raise ValueError(f"board: {n} values need {n + 2} words, got {board.shape[0]}")
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    done = pl.pallas_call(
        partial(_kernel, length=n),
        out_shape=jax.ShapeDtypeStruct((1,), jnp.int32),
        in_specs=[anywhere] * 3,
        out_specs=anywhere,
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="post",
    )(board, number.reshape(1), values)
    return done[0]


def _kernel(board: Any, number_ref: Any, values_ref: Any, done: Any, *, length: int) -> None:
    # The board is written though it is an operand: it is the host's memory, and XLA never reads it.
    lanes = jnp.arange(pl.next_power_of_2(length), dtype=jnp.int32)
    inside = lanes < length
    values = plgpu.load(values_ref.at[jnp.where(inside, lanes, 0)], mask=inside, other=0)
    number = number_ref[0]
    plgpu.store(board.at[jnp.where(inside, lanes + 1, 0)], values, mask=inside)
    board[length + 1] = number + jnp.sum(values)
    board[0] = number
    done[0] = number - number
