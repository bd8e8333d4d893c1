"""How experts are chosen, and what the kernel covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

Score = Literal["softmax", "sigmoid", "sqrt-softplus", "chosen-softmax"]

MAX_EXPERTS = 512  # scores that one warp holds, 16 a thread
MAX_CHOSEN = 16  # rounds


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How experts are chosen and weighed.

    score: "softmax" or "sigmoid" of the logits over all experts, "sqrt-softplus", the root of their softplus, or
        "chosen-softmax": the softmax over the logits of the chosen experts alone.
    normalize: weights are divided by their sum plus `eps`, then multiplied by `scale`.
    rounded_to: weights pass through this dtype at the end.
    """

    top_k: int
    score: Score
    normalize: bool = False
    eps: float = 0.0
    scale: float = 1.0
    rounded_to: jnp.dtype | None = None


def unfit_choice(num_experts: int, top_k: int) -> str | None:
    """Why the kernel cannot do it, if so."""
    if num_experts > MAX_EXPERTS or top_k > MAX_CHOSEN:
        return f"{top_k} of {num_experts} experts (at most {MAX_CHOSEN} of {MAX_EXPERTS} are chosen)"
    return None


class Recorded(NamedTuple):
    """Routing that replaces the choice, after it was made, for benchmarks: row `row` of `layer`, for every token."""

    ids: Int32[Array, "T L K"]
    weights: Float32[Array, "T L K"]
    row: Int32[Array, ""]
    layer: Int32[Array, ""]
