"""How the fields of experts come from the files: which part of which tensor each is, and in what form it is wanted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pallas_kernels.layout import FP8, ExpertLayout, Field, ScaleKind
from seqmoe_jax.checkpoints.fp8 import widen
from seqmoe_jax.checkpoints.read import read_part, read_scales, read_source
from seqmoe_jax.checkpoints.safetensors import Checkpoint
from seqmoe_jax.checkpoints.scales import Scales, scales_of
from seqmoe_jax.checkpoints.sources import NameMap, Source
from seqmoe_jax.errors import CheckpointError, ConfigError
from seqmoe_jax.models.quantization import SCALES, holds


@dataclass(frozen=True, kw_only=True)
class FieldJob:
    """One field of one expert. `block` is where the expert's bytes begin in its layer's array."""

    block: int
    field: Field
    source: Source
    spread: ScaleKind | None = None  # what the field holds scales of, where it holds no values of the source
    scales: Scales | None = None  # of the source, where it is FP8
    beside: bool = False  # there is a field for them

    def place(self, checkpoint: Checkpoint) -> tuple[str, int]:
        """Where its values lie, to read in the order of the files."""
        info = checkpoint.info(self.source.tensor)
        return str(info.path), info.offset + self.source.byte_range(info.dtype.itemsize)[0]

    def read(self, checkpoint: Checkpoint, names: NameMap, layer: np.ndarray) -> None:
        """Fills the field in the bytes of its layer."""
        start, source = self.block + self.field.offset, self.source
        out = layer[start : start + self.field.nbytes]
        typed = out.view(self.field.dtype).reshape(self.field.shape)
        stored = checkpoint.info(source.tensor).dtype
        if self.spread is not None:
            typed[...] = (
                1 if self.scales is None else _spread(checkpoint, source, self.scales, self.spread, typed.shape)
            )
        elif source.contiguous and (stored == self.field.dtype or source.packed):
            checkpoint.read_into(source.tensor, out, source.byte_range(stored.itemsize)[0])
        elif source.packed:
            typed[...] = read_part(checkpoint, source).view(np.uint8).reshape(self.field.shape)
        elif self.scales is not None and self.beside:
            typed[...] = widen(read_part(checkpoint, source))
        else:
            read_source(checkpoint, names, source, self.field.dtype, out=typed)


def field_jobs(checkpoint: Checkpoint, names: NameMap, layout: ExpertLayout, layer: int) -> list[FieldJob]:
    """The fields of all experts of a MoE layer. Raises where the layout cannot hold what the files have."""
    jobs = []
    for expert, sources in enumerate(names.experts[layer]):
        for field in layout.fields:
            spread = layout.scales if field.name.endswith("_scale") and field.name not in sources else None
            name = field.name.removesuffix("_scale") if spread else field.name
            if name not in sources:
                raise ConfigError(f"expert layout: expected fields {sorted(sources)}, got {field.name!r}")
            fp8 = checkpoint.info(sources[name].tensor).dtype == FP8
            job = FieldJob(
                block=expert * layout.block_bytes,
                field=field,
                source=sources[name],
                spread=spread,
                scales=scales_of(checkpoint, names, sources[name]) if fp8 else None,
                beside=layout.scales is not None,
            )
            _check(checkpoint, job)
            jobs.append(job)
    return jobs


def _check(checkpoint: Checkpoint, job: FieldJob) -> None:
    field, shape, tensor = job.field, job.source.part_shape, job.source.tensor
    if job.spread is not None:
        if job.scales is not None and not holds(job.spread, job.scales.within(shape)):
            raise ConfigError(
                f"expert layout: expected FP8 with scales by {job.spread}, got one for {list(job.scales.block)} of "
                f"{tensor!r}; build the layout with bfloat16 or float32 to have the experts dequantised"
            )
        return
    if field.dtype == FP8 and job.scales is None:
        raise ConfigError(
            f"expert layout: expected FP8 in the checkpoint, got {tensor!r} of {checkpoint.info(tensor).dtype}; "
            "build the layout with the checkpoint's dtype (it is not quantised while loading)"
        )
    if job.source.packed:  # files may count the bytes of a block apart
        shape = (shape[0], math.prod(shape[1:]))
    if shape != field.shape:
        raise CheckpointError(
            f"{checkpoint.directory}: expected {tensor!r} to give {field.name} "
            f"{list(field.shape)}, got {list(shape)}; check config.json"
        )


def _spread(
    checkpoint: Checkpoint, source: Source, scales: Scales, kind: ScaleKind, shape: tuple[int, ...]
) -> np.ndarray:
    """Scales in the form that the layout has: those of larger blocks once for each of its own."""
    rows, cols = source.part_shape
    height, width = (ours or size for ours, size in zip(SCALES[kind], (rows, cols), strict=True))
    grid = read_scales(checkpoint, scales, (rows, cols)).astype(np.float32)
    row, col = np.arange(0, rows, height) // scales.block[0], np.arange(0, cols, width) // scales.block[1]
    return grid[row][:, col].reshape(shape)
