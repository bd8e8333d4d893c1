"""What a part of a model says of its dense tensors, so that loading, planning and random weights need not know it.

A part (mixer, router, MLP) lists its tensors by canonical name, as checkpoints hold them, and assembles from them
the weights that its arithmetic wants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Array

FLOAT32 = np.dtype(np.float32)
INT32 = np.dtype(np.int32)


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Shape of one dense tensor, what random weights fill it with, and its dtype where that is a fixed one.

    `init`: "normal" has a standard deviation of 1 / sqrt(last axis), which makes maps of unit variance; "cycle" counts
    from 0 to `period` - 1 over and over.
    """

    shape: tuple[int, ...]
    init: Literal["normal", "ones", "zeros", "cycle"] = "normal"
    dtype: np.dtype | None = None  # None: that of the activations
    period: int = 1

    def nbytes(self, activations: np.dtype) -> int:
        return math.prod(self.shape) * (self.dtype or activations).itemsize


Tensors = dict[str, Tensor]
Take = Callable[..., Array]  # canonical names -> the tensor, or several along axis 0 as one


def below(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """The same tensors under `prefix.`."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def take_below(prefix: str, take: Take) -> Take:
    """`take` for names under `prefix.`."""
    return lambda *names: take(*(f"{prefix}.{name}" for name in names))
