"""Where a model's tensors lie in its checkpoint: the source of one tensor, the map of a whole model, its check."""

from __future__ import annotations

import fnmatch
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from seqmoe_jax.checkpoints.fp8 import DEFAULT_BLOCK, FP8, SCALE_DTYPES, scale_shape
from seqmoe_jax.checkpoints.safetensors import Checkpoint
from seqmoe_jax.errors import CheckpointError, ConfigError

log = logging.getLogger("seqmoe_jax")

FLOATS = ("float32", "bfloat16", "float16", "float64", FP8.name)
INTEGERS = ("int64", "int32")
PACKED = ("uint8", "int8", "float8_e8m0fnu")  # names under which checkpoints store bytes


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
    """Sources of every tensor of one model. `scale_suffix` turns a weight's name into that of its FP8 scales.

    `dense[name]`; `experts[moe_layer][expert][field]`; `layer_index[moe_layer]` is the layer's number in the
    model. `ignored` are patterns of checkpoint tensors that the model has no use for.
    """

    dense: Mapping[str, Source]
    experts: tuple[tuple[Mapping[str, Source], ...], ...]
    layer_index: tuple[int, ...]
    block: tuple[int, int] = DEFAULT_BLOCK
    scale_suffix: tuple[str, str] = ("", "_scale_inv")
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)

    def sources(self) -> Iterator[Source]:
        yield from self.dense.values()
        for layer in self.experts:
            for expert in layer:
                yield from expert.values()

    def scale_source(self, source: Source) -> Source:
        """The scales of an FP8 weight. Raises `ConfigError` where a part begins in the middle of a block."""
        end, replacement = self.scale_suffix
        rows = source.rows
        if not source.contiguous:
            raise ConfigError(
                f"tensor {source.tensor!r}: expected FP8 weights as [out, in] with gate and up apart, got them "
                "transposed or interleaved; save the checkpoint with one tensor per expert"
            )
        if rows is not None:
            if rows[0] % self.block[0]:
                raise ConfigError(
                    f"tensor {source.tensor!r}: expected parts that start at a multiple of {self.block[0]} "
                    f"rows (the FP8 block), got row {rows[0]}; save the checkpoint with one tensor per expert"
                )
            rows = (rows[0] // self.block[0], math.ceil(rows[1] / self.block[0]))
        return Source(
            tensor=source.tensor.removesuffix(end) + replacement,
            shape=scale_shape(source.shape, self.block),
            expert=source.expert,
            rows=rows,
        )


def check_names(checkpoint: Checkpoint, names: NameMap) -> None:
    """Compares map and headers before any weight is read. Raises `CheckpointError` with counts."""
    wanted: dict[str, tuple[int, ...]] = {}
    missing: list[str] = []
    wrong: list[str] = []

    def see(name: str, shape: tuple[int, ...], allowed: tuple[str, ...]) -> None:
        if name in wanted:
            return
        wanted[name] = shape
        if name not in checkpoint.names:
            missing.append(name)
            return
        info = checkpoint.info(name)
        if info.shape != shape:
            wrong.append(f"{name} {list(info.shape)} for {list(shape)}")
        elif info.dtype.name not in allowed:
            wrong.append(f"{name} of {info.dtype}")

    for source in names.sources():
        kinds = PACKED if source.packed else INTEGERS if source.integers else FLOATS
        see(source.tensor, source.shape, kinds)
        if source.tensor in checkpoint.names and checkpoint.info(source.tensor).dtype == FP8:
            scale = names.scale_source(source)
            see(scale.tensor, scale.shape, tuple(dtype.name for dtype in SCALE_DTYPES))
    unused = [name for name in checkpoint.names if name not in wanted]
    left = {pattern: fnmatch.filter(unused, pattern) for pattern in names.ignored}
    extra = sorted(set(unused).difference(*left.values()))
    found = [(missing, "missing"), (wrong, "of a wrong shape or dtype"), (extra, "unexpected")]
    faults = [f"{len(which)} {what} ({_first(which)})" for which, what in found if which]
    if faults:
        raise CheckpointError(
            f"{checkpoint.directory}: expected the {len(wanted)} tensors that config.json calls for, got "
            f"{', '.join(faults)}; do config.json and weights belong together?"
        )
    skipped = [f"{pattern} ({len(which)} tensors)" for pattern, which in left.items() if which]
    if skipped:
        log.info("%s: left out %s, of no use to the text model", checkpoint.directory, ", ".join(skipped))


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
