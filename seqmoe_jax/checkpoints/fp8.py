"""FP8 weights: `w[i, j] = q[i, j] * scale[i // R, j // C]`. R x C are blocks, single rows, or all of a matrix."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from seqmoe_jax.errors import CheckpointError

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
SCALE_DTYPES = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu))
_VALUES = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)
# Two at once, by the 16 bits that two neighbours make: three times as fast as a cast, and without the GIL.
_PAIRS = _VALUES[np.arange(65536, dtype=np.uint16).view(np.uint8)].view(np.uint64)
CHUNK_ELEMS = 1 << 20  # float32 working set of 4 MiB: stays in cache, and peak memory does not grow with the tensor


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """`[..., N, K]` -> `[..., ceil(N/R), ceil(K/C)]`; the last blocks may be ragged."""
    return (*shape[:-2], math.ceil(shape[-2] / block[0]), math.ceil(shape[-1] / block[1]))


def dequantize(
    weight: Shaped[np.ndarray, "*batch N K"],
    scale: Shaped[np.ndarray, "*batch n k"],
    *,
    block: tuple[int, int],
    dtype: np.dtype | type,
    out: np.ndarray | None = None,
) -> Shaped[np.ndarray, "*batch N K"]:
    """`weight * scale` in float32, rounded once to `dtype`. Works row chunk by row chunk.

    `out`, where given, is filled and returned. Raises `CheckpointError` where the scales' shape or dtype does
    not fit.
    """
    expected = scale_shape(weight.shape, block)
    if scale.shape != expected or scale.dtype not in SCALE_DTYPES:
        kinds = "/".join(kind.name for kind in SCALE_DTYPES)
        raise CheckpointError(
            f"FP8 weight {list(weight.shape)} in blocks of {list(block)}: expected scales {list(expected)} "
            f"of {kinds}, got {list(scale.shape)} of {scale.dtype}; check weight_block_size in config.json"
        )
    if out is None:
        out = np.empty(weight.shape, dtype)
    rows, cols = weight.shape[-2:]
    step = max(1, CHUNK_ELEMS // max(1, cols))
    for index in np.ndindex(weight.shape[:-2]):
        factors = scale[index].astype(np.float32)
        for start in range(0, rows, step):
            chunk = widen(weight[index][start : start + step])
            by_row = factors[np.arange(start, start + len(chunk)) // block[0]]
            chunk *= by_row if by_row.shape[1] == 1 else np.repeat(by_row, block[1], 1)[:, :cols]
            out[index][start : start + step] = chunk
    return out


def widen(weight: Shaped[np.ndarray, "rows cols"]) -> Shaped[np.ndarray, "rows cols"]:
    """e4m3 -> float32, exactly."""
    raw = np.ascontiguousarray(weight).view(np.uint8)
    if raw.size % 2:
        return _VALUES[raw]
    # "clip" is the mode that checks nothing; there is nothing outside the table.
    pairs = np.take(_PAIRS, raw.reshape(-1).view(np.uint16), mode="clip")
    return pairs.view(np.float32).reshape(raw.shape)
