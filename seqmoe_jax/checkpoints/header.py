"""The header of one safetensors file, read and checked in full before any of it is trusted.

A file is `u64 little-endian N`, N bytes of JSON `{name: {dtype, shape, data_offsets: [begin, end]}}`, then
the data. The format demands that the tensors cover the data exactly: no overlap, no hole, nothing after the
last one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from seqmoe_jax.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
}
DOWNLOAD_AGAIN = "the file is damaged or its download did not finish: download it again"


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies. `offset` is in bytes from the start of the file `path`."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


def fault(path: Path, expected: str, came: object, advice: str = DOWNLOAD_AGAIN) -> CheckpointError:
    """The one line that every fault of a file becomes."""
    line = f"{path}: expected {expected}, got {came}; {advice}"
    return CheckpointError(" ".join(line.split()))


def header_length(path: Path, prefix: bytes, file_size: int) -> int:
    """Length of the JSON, from the file's first 8 bytes. Raises `CheckpointError`."""
    if file_size < 8 or len(prefix) < 8:
        raise fault(path, "a safetensors file of at least 8 bytes", f"{min(file_size, len(prefix))} bytes")
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise fault(path, f"a header of at most {MAX_HEADER_BYTES} bytes", f"a length field of {length}")
    if 8 + length > file_size:
        raise fault(path, f"a header of {length} bytes", f"a file of only {file_size} bytes")
    return length


def parse_header(path: Path, text: bytes, file_size: int) -> dict[str, TensorInfo]:
    """The header's JSON -> tensors in file order. Raises `CheckpointError` where the format forbids it."""
    if not text.startswith(b"{"):
        raise fault(path, "a header that begins with '{'", repr(text[:8]))
    try:
        raw = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise fault(path, "a header of UTF-8 JSON", _short(error)) from error
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise fault(path, "__metadata__ to be a map of strings", _short(metadata))
    start = 8 + len(text)
    infos = sorted((_tensor(path, name, entry, start) for name, entry in raw.items()), key=_place)
    end = start
    for info in infos:
        if info.offset != end:
            what = "overlaps the tensor before it" if info.offset < end else "leaves a hole before it"
            raise fault(path, f"tensor {_short(info.name)} at byte {end}", f"byte {info.offset}, which {what}")
        end += info.nbytes
    if end != file_size:
        raise fault(path, f"a file of {end} bytes by its header", f"{file_size} bytes")
    return {info.name: info for info in infos}


def _place(info: TensorInfo) -> tuple[int, int]:
    return info.offset, info.nbytes


def _short(value: object) -> str:
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise ValueError(f"the key {_short(key)} twice")
        key.encode("utf-8")  # a lone surrogate is a ValueError: no name can be printed or looked up with it
        entries[key] = value
    return entries


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _tensor(path: Path, name: str, entry: object, start: int) -> TensorInfo:
    label = f"tensor {_short(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise fault(path, f"{label} to have dtype, shape and data_offsets", _short(entry))
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = "/".join(DTYPES)
        raise fault(path, f"{label} of dtype {known}", _short(dtype), "this format is not supported")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise fault(path, f"{label} with a shape of whole numbers", _short(shape))
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise fault(path, f"{label} with data_offsets [begin, end]", _short(offsets))
    begin, end = offsets
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != nbytes:
        raise fault(path, f"{label} ({dtype} {_short(shape)}) to take {nbytes} bytes", f"data_offsets {offsets}")
    return TensorInfo(
        name=name, dtype=DTYPES[dtype], shape=tuple(shape), path=path, offset=start + begin, nbytes=nbytes
    )
