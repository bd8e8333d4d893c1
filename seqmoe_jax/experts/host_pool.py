"""All experts in pinned host memory: one array `storage[E, n]` per MoE layer, filled in place from the files.

Each layer is filled from the files before it becomes an array, in the same memory, so the bytes of a checkpoint exist
once in this process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Shaped

from pallas_kernels.layout import FP8_BLOCK, ExpertLayout, Field
from seqmoe_jax.checkpoints.fp8 import FP8
from seqmoe_jax.checkpoints.read import read_part, read_source
from seqmoe_jax.checkpoints.safetensors import Checkpoint
from seqmoe_jax.checkpoints.sources import NameMap, Source
from seqmoe_jax.errors import CheckpointError, ConfigError
from seqmoe_jax.host_memory import Progress
from seqmoe_jax.pinned import fresh_pages, pinned_array

Pool = tuple[Shaped[Array, "E n"], ...]
Work = Callable[[np.ndarray], int]  # writes into the bytes of one layer (uint8), returns how many it wrote
BATCH_BYTES = 32 << 20  # what one thread reads before it looks for more: long enough to be sequential on disk


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One field of one expert. `block` is where the expert's bytes begin in its layer's array."""

    block: int
    field: Field
    source: Source
    scales: bool  # the field holds the scales of the source, not its values


def workers() -> int:
    """How many threads fill the pool."""
    return min(16, os.cpu_count() or 1)


def load_host_pool(
    checkpoint: Checkpoint,
    names: NameMap,
    layout: ExpertLayout,
    *,
    num_layers: int,
    num_experts: int,
    device: jax.Device,
    progress: Progress | None = None,
) -> Pool:
    """Reads every expert into host memory of `device`: `num_layers` (MoE layers) arrays `storage[E, n]`.

    Fields whose dtype is that of the files are read straight into place; others are converted expert by
    expert (FP8 is dequantised, scales become float32). Raises `ConfigError` where the layout cannot hold what
    the files have, `CheckpointError` where a file ends early.
    """
    if len(names.experts) != num_layers or any(len(layer) != num_experts for layer in names.experts):
        found = f"{len(names.experts)} x {sorted({len(layer) for layer in names.experts})}"
        raise ConfigError(f"expected {num_layers} MoE layers of {num_experts} experts, got {found}; check config.json")
    jobs = [_layer_jobs(checkpoint, names, layout, layer) for layer in range(num_layers)]

    def place(job: _Job) -> tuple[str, int]:
        info = checkpoint.info(job.source.tensor)
        return str(info.path), info.offset + job.source.byte_range(info.dtype.itemsize)[0]

    for layer in jobs:
        layer.sort(key=place)
    order = sorted(range(num_layers), key=lambda layer: place(jobs[layer][0]))

    def fill(batch: list[_Job], view: np.ndarray) -> int:
        for job in batch:
            _read_job(checkpoint, names, job, view)
        return sum(job.field.nbytes for job in batch)

    def work(layer: int) -> list[Work]:
        return [partial(fill, batch) for batch in _batched(jobs[layer])]

    total = sum(job.field.nbytes for layer in jobs for job in layer)
    return build_pool(
        layout,
        order,
        work,
        num_experts=num_experts,
        device=device,
        total=total,
        progress=progress,
    )


def build_pool(
    layout: ExpertLayout,
    order: Iterable[int],
    work: Callable[[int], Iterable[Work]],
    *,
    num_experts: int,
    device: jax.Device,
    total: int,
    progress: Progress | None,
) -> Pool:
    """Fills the layers in `order`, each by the `work` of its index on threads, and pins each when it is filled.

    That needs the memory of the pool and no more. `total` is for `progress`, in bytes.
    """
    arrays: dict[int, Array] = {}
    done = 0
    executor = ThreadPoolExecutor(workers(), thread_name_prefix="seqmoe-host-pool")
    try:
        filling = [(layer, pages := fresh_pages(num_experts * layout.block_bytes),
                    [executor.submit(item, pages) for item in work(layer)]) for layer in order]  # fmt: skip
        for layer, pages, pending in filling:
            for future in pending:
                done += future.result()
                if progress is not None:
                    progress(done, total)
            blocks = pages.view(layout.storage).reshape(num_experts, layout.block_elems)
            arrays[layer] = pinned_array(blocks, device)
    finally:
        # After a fault or an interrupt the pages must not go before the last write into them.
        executor.shutdown(wait=True, cancel_futures=True)
    return tuple(arrays[layer] for layer in sorted(arrays))


def _layer_jobs(checkpoint: Checkpoint, names: NameMap, layout: ExpertLayout, layer: int) -> list[_Job]:
    jobs = []
    for expert, sources in enumerate(names.experts[layer]):
        for field in layout.fields:
            scales = field.name.endswith("_scale") and field.name not in sources
            name = field.name.removesuffix("_scale") if scales else field.name
            if name not in sources:
                raise ConfigError(f"expert layout: expected fields {sorted(sources)}, got {field.name!r}")
            job = _Job(block=expert * layout.block_bytes, field=field, source=sources[name], scales=scales)
            _check_job(checkpoint, names, job)
            jobs.append(job)
    return jobs


def _check_job(checkpoint: Checkpoint, names: NameMap, job: _Job) -> None:
    stored, field = checkpoint.info(job.source.tensor).dtype, job.field
    if (job.scales or field.dtype == FP8) and stored != FP8:
        raise ConfigError(
            f"expert layout: expected FP8 in the checkpoint, got {job.source.tensor!r} of {stored}; "
            "build the layout with the checkpoint's dtype (it is not quantised while loading)"
        )
    if (job.scales or field.dtype == FP8) and names.block != (FP8_BLOCK, FP8_BLOCK):
        raise ConfigError(
            f"expert layout: expected FP8 blocks of {FP8_BLOCK} x {FP8_BLOCK}, got weight_block_size "
            f"{list(names.block)}; build the layout with bfloat16 or float32 to have the experts dequantised"
        )
    shape = (names.scale_source(job.source) if job.scales else job.source).part_shape
    if job.source.packed:  # files may count the bytes of a block apart
        shape = (shape[0], math.prod(shape[1:]))
    if shape != field.shape:
        raise CheckpointError(
            f"{checkpoint.directory}: expected {job.source.tensor!r} to give {field.name} "
            f"{list(field.shape)}, got {list(shape)}; check config.json"
        )


def _read_job(checkpoint: Checkpoint, names: NameMap, job: _Job, view: np.ndarray) -> None:
    start = job.block + job.field.offset
    out = view[start : start + job.field.nbytes]
    source = names.scale_source(job.source) if job.scales else job.source
    stored = checkpoint.info(source.tensor).dtype
    if source.contiguous and (stored == job.field.dtype or source.packed):
        checkpoint.read_into(source.tensor, out, source.byte_range(stored.itemsize)[0])
        return
    typed = out.view(job.field.dtype).reshape(job.field.shape)
    if source.packed:
        typed[...] = read_part(checkpoint, source).view(np.uint8).reshape(job.field.shape)
    elif job.scales:
        typed[...] = read_part(checkpoint, source)
    else:
        read_source(checkpoint, names, source, job.field.dtype, out=typed)


def _batched(jobs: list[_Job]) -> Iterable[list[_Job]]:
    batch: list[_Job] = []
    size = 0
    for job in jobs:
        batch.append(job)
        size += job.field.nbytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
