"""Reads what a name map points at: raw bytes, converted arrays, all dense tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from seqmoe_jax.checkpoints.fp8 import FP8, dequantize, scale_shape
from seqmoe_jax.checkpoints.header import fault
from seqmoe_jax.checkpoints.safetensors import Checkpoint
from seqmoe_jax.checkpoints.scales import Scales, scales_of
from seqmoe_jax.checkpoints.sources import NameMap, Source

SMALL = 1 << 16  # values


def read_part(checkpoint: Checkpoint, source: Source) -> np.ndarray:
    """The source's part as it is stored, `[*part_shape]` in the checkpoint's dtype."""
    dtype = checkpoint.info(source.tensor).dtype
    offset, nbytes = source.byte_range(dtype.itemsize)
    raw = np.empty(nbytes, np.uint8)
    checkpoint.read_into(source.tensor, raw, offset)
    return source.part_of(raw.view(dtype))


def read_scales(checkpoint: Checkpoint, scales: Scales, weight: tuple[int, ...]) -> np.ndarray:
    """The scales of a part of the shape `weight`, `[rows, columns]` of its blocks as they are stored."""
    return read_part(checkpoint, scales.source).reshape(scale_shape(weight, scales.block))


def read_source(
    checkpoint: Checkpoint,
    names: NameMap,
    source: Source,
    dtype: np.dtype | type,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """The source's part in `dtype`, `[*part_shape]` (in `out` where given). FP8 has its scales applied."""
    stored = read_part(checkpoint, source)
    if stored.dtype == FP8:
        scales = scales_of(checkpoint, names, source)
        grid = read_scales(checkpoint, scales, stored.shape)
        return dequantize(stored, grid, block=scales.block, dtype=dtype, out=out)
    if out is None:
        return stored.astype(dtype, copy=False)
    out[...] = stored
    return out


def _read_dense(checkpoint: Checkpoint, names: NameMap, source: Source, dtype: np.dtype) -> np.ndarray:
    """Raises `CheckpointError` for a norm, a bias or the like that is not finite: no answer could come of it.

    Large matrices are not looked through, which would take longer than reading them; the step looks at its logits.
    """
    array = read_source(checkpoint, names, source, dtype)
    if array.size <= SMALL and not np.isfinite(array).all():
        info = checkpoint.info(source.tensor)
        raise fault(info.path, f"finite numbers in {info.name!r}", "NaN or an infinity")
    return array


def iter_dense(
    checkpoint: Checkpoint, names: NameMap, *, dtypes: Mapping[str, np.dtype], workers: int = 4
) -> Iterator[tuple[str, np.ndarray]]:
    """`(model name, array in dtypes[model name])` for every dense tensor in file order, read ahead by threads.

    A caller that puts each on its device and drops it never holds the dense part twice.
    """

    def place(item: tuple[str, Source]) -> tuple[str, int]:
        info = checkpoint.info(item[1].tensor)
        return str(info.path), info.offset

    ahead: deque[tuple[str, Future[np.ndarray]]] = deque()
    executor = ThreadPoolExecutor(workers, thread_name_prefix="seqmoe-dense")
    try:
        for name, source in sorted(names.dense.items(), key=place):
            ahead.append((name, executor.submit(_read_dense, checkpoint, names, source, dtypes[name])))
            if len(ahead) > workers:
                first, future = ahead.popleft()
                yield first, future.result()
                del future  # or the array would live until the next one is ready
        while ahead:
            first, future = ahead.popleft()
            yield first, future.result()
            del future
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
