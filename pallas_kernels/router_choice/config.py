"""What the choosing kernel covers."""

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
    """How experts are chosen and weighed; the fields mean what they mean in `RouterSpec`. Weights are rounded through
    `rounded_to` at the end."""

    top_k: int
    score: Score
    normalize: bool = False
    eps: float = 0.0
    scale: float = 1.0
    rounded_to: jnp.dtype | None = None


class Recorded(NamedTuple):
    """Routing that replaces the choice, after it was made, for benchmarks: row `row` of `layer`, for every token."""

    ids: Int32[Array, "T L K"]
    weights: Float32[Array, "T L K"]
    row: Int32[Array, ""]
    layer: Int32[Array, ""]
