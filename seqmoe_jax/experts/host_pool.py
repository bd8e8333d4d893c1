"""All experts in pinned host memory: one array `storage[E, n]` per MoE layer, filled in place from the files.

Each layer is filled from the files before it becomes an array, in the same memory, so the bytes of a checkpoint exist
once in this process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Shaped

from pallas_kernels.layout import ExpertLayout
from seqmoe_jax.checkpoints.safetensors import Checkpoint
from seqmoe_jax.checkpoints.sources import NameMap
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.experts.reading import FieldJob, field_jobs
from seqmoe_jax.host_memory import Progress
from seqmoe_jax.pinned import fresh_pages, pinned_array

Pool = tuple[Shaped[Array, "E n"], ...]
Work = Callable[[np.ndarray], int]  # writes into the bytes of one layer (uint8), returns how many it wrote
BATCH_BYTES = 32 << 20  # what one thread reads before it looks for more: long enough to be sequential on disk


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

    Fields whose dtype is that of the files are read straight into place; others are converted expert by expert (scales
    become float32; FP8 is dequantised where the layout has none). Raises `ConfigError` where the layout cannot hold
    what the files have, `CheckpointError` where a file ends early.
    """
    if len(names.experts) != num_layers or any(len(layer) != num_experts for layer in names.experts):
        found = f"{len(names.experts)} x {sorted({len(layer) for layer in names.experts})}"
        raise ConfigError(f"expected {num_layers} MoE layers of {num_experts} experts, got {found}; check config.json")
    jobs = [field_jobs(checkpoint, names, layout, layer) for layer in range(num_layers)]

    for layer in jobs:
        layer.sort(key=lambda job: job.place(checkpoint))
    order = sorted(range(num_layers), key=lambda layer: jobs[layer][0].place(checkpoint))

    def fill(batch: list[FieldJob], view: np.ndarray) -> int:
        for job in batch:
            job.read(checkpoint, names, view)
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


def _batched(jobs: list[FieldJob]) -> Iterable[list[FieldJob]]:
    batch: list[FieldJob] = []
    size = 0
    for job in jobs:
        batch.append(job)
        size += job.field.nbytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
