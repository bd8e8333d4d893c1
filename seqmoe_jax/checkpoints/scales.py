"""The scales of an FP8 weight: under which name they lie in a checkpoint, and how many elements each is of."""

from __future__ import annotations

import math
from dataclasses import dataclass

from seqmoe_jax.checkpoints.fp8 import SCALE_DTYPES, scale_shape
from seqmoe_jax.checkpoints.safetensors import Checkpoint
from seqmoe_jax.checkpoints.sources import NameMap, Source
from seqmoe_jax.errors import CheckpointError, ConfigError

DTYPES = tuple(dtype.name for dtype in SCALE_DTYPES)


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Where they lie, and of how many rows and columns of the weight's part each is."""

    source: Source
    block: tuple[int, int]

    def within(self, shape: tuple[int, ...]) -> tuple[int | None, int | None]:
        """The block; None for rows or columns where it is of all that a part of this shape has."""
        rows, cols = (None if size >= whole else size for size, whole in zip(self.block, shape, strict=True))
        return rows, cols


def scales_name(checkpoint: Checkpoint, weight: str) -> str | None:
    """The checkpoint's name for the scales of a weight. All of them are multiplied, `_inv` too."""
    names = [f"{weight}_scale_inv", f"{weight}_scale"]
    if weight.endswith(".weight"):
        names.append(weight.removesuffix("weight") + "scale")
    return next((name for name in names if name in checkpoint.names), None)


def scales_of(checkpoint: Checkpoint, names: NameMap, source: Source) -> Scales:
    """The scales of an FP8 weight, or of the part of one that a source is.

    Raises `CheckpointError` where there are none, or of a shape that fits nothing; `ConfigError` where the part is none
    of whole scales.
    """
    name = scales_name(checkpoint, source.tensor)
    if name is None:
        raise CheckpointError(f"{checkpoint.directory}: expected scales of {source.tensor!r}, got none of that name")
    shape = checkpoint.info(name).shape
    inner, per_expert = (shape, False) if source.expert is None else (shape[1:], True)
    weight = source.shape[1:] if per_expert else source.shape
    if (per_expert and shape[:1] != source.shape[:1]) or (block := _block(weight, inner, names.block)) is None:
        raise CheckpointError(
            f"{checkpoint.directory}: FP8 weight {source.tensor!r} {list(source.shape)}: expected one scale, one for "
            f"each row, or {list(scale_shape(source.shape, names.block))} in blocks of {list(names.block)}, got "
            f"{name!r} {list(shape)}; check quantization_config in config.json"
        )
    where = Source(tensor=name, shape=shape, expert=source.expert)
    if math.prod(inner) == 1:
        return Scales(source=where, block=(max(1, source.part_shape[-2]), block[1]))
    if not source.contiguous:
        raise ConfigError(
            f"tensor {source.tensor!r}: expected FP8 weights as [out, in] with gate and up apart, got them "
            "transposed or interleaved; save the checkpoint with one tensor per expert"
        )
    if source.rows is None:
        return Scales(source=where, block=block)
    first, last = source.rows
    if first % block[0]:
        raise ConfigError(
            f"tensor {source.tensor!r}: expected parts that start at a multiple of {block[0]} "
            f"rows (the FP8 block), got row {first}; save the checkpoint with one tensor per expert"
        )
    rows = (first // block[0], math.ceil(last / block[0]))
    return Scales(source=Source(tensor=name, shape=shape, expert=source.expert, rows=rows), block=block)


def _block(weight: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int] | None:
    """Rows and columns of one scale, from the shapes of both. None where they do not fit."""
    if len(weight) != 2:
        return None
    rows, cols = weight
    if math.prod(scales) == 1:
        return rows, cols
    if scales in ((rows,), (rows, 1)):
        return 1, cols
    if scales == scale_shape(weight, block):
        return block
    if len(scales) == 2 and scales[0] == rows and cols % scales[1] == 0:
        return 1, cols // scales[1]
    return None
