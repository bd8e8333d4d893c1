"""All experts in pinned host memory: one array `storage[E, n]` per MoE layer, filled in place from the files.

Each array is allocated first and then written through its own address, so the bytes of a checkpoint exist
once in this process. Nothing may read a pool before the function that fills it has returned.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Shaped

from pallas_kernels.layout import FP4, FP8_BLOCK, ExpertLayout, Field
from seqmoe_jax.checkpoints.fp8 import FP8
from seqmoe_jax.checkpoints.read import read_part, read_source
from seqmoe_jax.checkpoints.safetensors import Checkpoint
from seqmoe_jax.checkpoints.sources import NameMap, Source
from seqmoe_jax.errors import CheckpointError, ConfigError
from seqmoe_jax.host_memory import Progress, host_view

Pool = tuple[Shaped[Array, "E n"], ...]
_Work = Callable[[np.ndarray], int]  # writes into the bytes of one layer, returns how many
FP4_SPREAD = 2.8  # of e2m1 values with uniform codes
BATCH_BYTES = 32 << 20  # what one thread reads before it looks for more: long enough to be sequential on disk
FP8_SPREAD = 100.0  # of random e4m3 values: the largest, 448, is 4.5 deviations out, as in a real block


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One field of one expert. `block` is where the expert's bytes begin in its layer's array."""

    block: int
    field: Field
    source: Source
    scales: bool  # the field holds the scales of the source, not its values


def default_workers() -> int:
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
    workers: int | None = None,
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

    def work(layer: int) -> list[_Work]:
        return [partial(fill, batch) for batch in _batched(jobs[layer])]

    total = sum(job.field.nbytes for layer in jobs for job in layer)
    return _build(
        layout,
        order,
        work,
        num_experts=num_experts,
        device=device,
        total=total,
        progress=progress,
        workers=workers,
    )


def random_host_pool(
    layout: ExpertLayout,
    num_layers: int,
    num_experts: int,
    *,
    seed: int = 0,
    scale: float = 1.0,
    device: jax.Device | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
) -> Pool:
    """Random weights of deviation `scale / sqrt(fan_in)` at the speed of memory, for presets and benchmarks.

    One random expert is drawn; every other is that one with each field rotated and its signs flipped by a
    draw of its own, so experts differ and stay finite in every format. The same seed gives the same pool.
    """
    rng = np.random.default_rng(seed)
    templates = [_random_field(layout, field, rng, scale) for field in layout.fields]
    turns = rng.random((num_layers, num_experts, len(layout.fields)))
    flips = rng.integers(0, 2, (num_layers, num_experts, len(layout.fields)), dtype=np.uint8)

    def fill(layer: int, expert: int, view: np.ndarray) -> int:
        for index, (field, template) in enumerate(zip(layout.fields, templates, strict=True)):
            start = expert * layout.block_bytes + field.offset
            out = view[start : start + field.nbytes].view(template.dtype)
            turn = int(turns[layer, expert, index] * template.size)
            mask = _sign_mask(field, template.dtype) * flips[layer, expert, index]
            np.bitwise_xor(template[turn:], mask, out=out[: template.size - turn])
            np.bitwise_xor(template[:turn], mask, out=out[template.size - turn :])
        return layout.block_bytes

    def work(layer: int) -> list[_Work]:
        return [partial(fill, layer, expert) for expert in range(num_experts)]

    return _build(
        layout,
        range(num_layers),
        work,
        num_experts=num_experts,
        device=device if device is not None else jax.devices()[0],
        total=num_layers * num_experts * layout.block_bytes,
        progress=progress,
        workers=workers,
    )


def _random_field(layout: ExpertLayout, field: Field, rng: np.random.Generator, scale: float) -> np.ndarray:
    """The bytes of one random field as unsigned integers as wide as its elements, `[prod(shape)]`."""
    size = math.prod(field.shape)
    bits = np.dtype(f"u{field.dtype.itemsize}")
    matrix = field.name.removesuffix("_scale").removesuffix("_bias")
    deviation = scale / math.sqrt(layout.width if matrix == "down" else layout.hidden)
    values: np.ndarray
    if field.name.endswith("_scale") and layout.dtype == FP4:
        # Exponents next to the one that gives codes, which are uniform, the deviation.
        return rng.integers(-1, 2, size).astype(np.uint8) + np.uint8(127 + round(math.log2(deviation / FP4_SPREAD)))
    if field.name.endswith("_scale"):
        # FP8 values have a deviation of FP8_SPREAD. Scales of real checkpoints spread at least this widely.
        values = deviation / FP8_SPREAD * rng.uniform(0.8, 1.25, size)
    elif field.dtype.kind in "iub":
        return rng.integers(0, 256, size * field.dtype.itemsize, dtype=np.uint8).view(bits)
    elif field.dtype == FP8:
        values = np.clip(rng.standard_normal(size, np.float32) * np.float32(FP8_SPREAD), -448, 448)
    else:
        values = rng.standard_normal(size, np.float32) * np.float32(deviation)
    return values.astype(field.dtype).view(bits)


def _sign_mask(field: Field, bits: np.dtype) -> np.generic:
    """The bit that negates an element of `field`; none for scales (they are positive) and packed integers."""
    signed = field.dtype.kind not in "iub" and not field.name.endswith("_scale")
    return bits.type(1 << (8 * bits.itemsize - 1) if signed else 0)


def allocate_layer(layout: ExpertLayout, num_experts: int, device: jax.Device) -> Shaped[Array, "E n"]:
    """A zeroed `storage[E, n]` in `pinned_host` memory of `device`, with memory of its own.

    The source is a fresh run of pages that were never written: they cost no memory where the backend copies
    them (GPU), and where it adopts them (CPU, which takes any 64-byte aligned array as it is) they belong to
    this array alone.
    """
    pages = mmap.mmap(-1, num_experts * layout.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)  # first writes are several times faster than with 4 KiB pages
    source = np.frombuffer(pages, layout.storage).reshape(num_experts, layout.block_elems)
    array = jax.device_put(source, SingleDeviceSharding(device, memory_kind="pinned_host"))
    return array.block_until_ready()


def _build(
    layout: ExpertLayout,
    order: Iterable[int],
    work: Callable[[int], Iterable[_Work]],
    *,
    num_experts: int,
    device: jax.Device,
    total: int,
    progress: Progress | None,
    workers: int | None,
) -> Pool:
    """Allocates layers in `order` while threads fill those before: pinning pages takes as long as reading."""
    arrays: dict[int, Array] = {}
    pending: list[Future[int]] = []
    done = 0
    executor = ThreadPoolExecutor(workers or default_workers(), thread_name_prefix="seqmoe-host-pool")
    try:
        for layer in order:
            arrays[layer] = allocate_layer(layout, num_experts, device)
            view = host_view(arrays[layer]).reshape(-1).view(np.uint8)
            pending += [executor.submit(item, view) for item in work(layer)]
            for future in [future for future in pending if future.done()]:
                done += future.result()
                pending.remove(future)
            if progress is not None:
                progress(done, total)
        for future in as_completed(pending):
            done += future.result()
            if progress is not None:
                progress(done, total)
    finally:
        # After a fault or an interrupt the arrays must not go before the last write into them.
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
