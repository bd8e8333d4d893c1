"""Where a model's tensors lie in its checkpoint: the source of one tensor, and the map of a whole model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pallas_kernels.layout import FP8_BLOCK


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint tensor of `shape`, or a part of it: row `expert` of axis 0, transposed if the file holds
    `[in, out]`, and of that every `step`-th of `rows`.

    `packed` tensors hold bytes that are no numbers by themselves (FP4 codes, exponents), `integers` hold ids.
    """

    tensor: str
    shape: tuple[int, ...]
    expert: int | None = None
    rows: tuple[int, int] | None = None
    step: int = 1
    transposed: bool = False
    packed: bool = False
    integers: bool = False

    @property
    def _inner(self) -> tuple[int, ...]:
        return self.shape if self.expert is None else self.shape[1:]

    @property
    def part_shape(self) -> tuple[int, ...]:
        shape = self._inner[::-1] if self.transposed else self._inner
        return shape if self.rows is None else (-(-(self.rows[1] - self.rows[0]) // self.step), *shape[1:])

    @property
    def contiguous(self) -> bool:
        """Whether the bytes of the part lie in the file one after another, in the order in which they are wanted."""
        return self.step == 1 and not self.transposed

    def byte_range(self, itemsize: int) -> tuple[int, int]:
        """Offset inside the tensor, and length, in bytes, of what has to be read."""
        size = math.prod(self._inner)
        start = 0 if self.expert is None else self.expert * size
        if self.rows is None or self.transposed:
            return start * itemsize, size * itemsize
        row = math.prod(self._inner[1:])
        return (start + self.rows[0] * row) * itemsize, (self.rows[1] - self.rows[0]) * row * itemsize

    def part_of(self, read: np.ndarray) -> np.ndarray:
        """The part, a view of what was read, `[*part_shape]`."""
        if self.transposed:
            whole = read.reshape(self._inner).T
            return whole if self.rows is None else whole[self.rows[0] : self.rows[1] : self.step]
        return read.reshape(-1, *self._inner[1:])[:: self.step]


@dataclass(frozen=True, kw_only=True)
class NameMap:
    """Sources of every tensor of one model. `block` is how many rows and columns share a scale of an FP8 weight, where
    its scales are by block; `activations` whether servers quantise these too, which is not done here.

    `dense[name]`; `experts[moe_layer][expert][field]`; `layer_index[moe_layer]` is the layer's number in the
    model. `ignored` are patterns of checkpoint tensors that the model has no use for.
    """

    dense: Mapping[str, Source]
    experts: tuple[tuple[Mapping[str, Source], ...], ...]
    layer_index: tuple[int, ...]
    block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK)
    activations: bool = False
    ignored: tuple[str, ...] = ()

    def sources(self) -> Iterator[Source]:
        yield from self.dense.values()
        for layer in self.experts:
            for expert in layer:
                yield from expert.values()
