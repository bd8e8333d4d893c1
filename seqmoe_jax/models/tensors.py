"""What a part of a model says of its dense tensors, so that loading, planning and random weights need not know it.

Every part (mixer, router, MLP, residual) has two methods. `tensors` lists its tensors as checkpoints hold them, by
names of this package's own, whatever family they come from. `assemble` makes from them the weights that the part's
arithmetic wants, for which it calls the `Take` that it is given: the caller decides where tensors come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
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
# Called with names of tensors; gives the tensor of that name, or for several names one array of them along axis 0.
Take = Callable[..., Array]


def take_from(tensor: Callable[[str], Array]) -> Take:
    """A `Take` of what gives one tensor by its name."""

    def take(*names: str) -> Array:
        arrays = [tensor(name) for name in names]
        return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)

    return take


def below(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors of a part within the whole that holds it: each name with `prefix.` before it."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def take_below(prefix: str, take: Take) -> Take:
    """The `Take` for a part whose names stand in `take` with `prefix.` before them; the counterpart of `below`."""
    return lambda *names: take(*(f"{prefix}.{name}" for name in names))
