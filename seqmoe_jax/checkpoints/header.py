"""Where the tensors of one safetensors file lie, so that an expert's bytes can be read straight into pinned memory.

The `safetensors` package checks the header: what it accepts has no overlap, no hole and nothing after the last tensor.
It says no offsets, but they follow, since `offset_keys` gives the tensors in the order in which they lie.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from seqmoe_jax.errors import CheckpointError

# The package's NumPy interface has none of the FP8 formats.
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
    """Any fault of a file, as an error of one line."""
    came = " ".join(str(came).split())
    return CheckpointError(f"{path}: expected {expected}, got {came[:200]}; {advice}")


def read_header(path: Path, fd: int) -> dict[str, TensorInfo]:
    """The tensors of a file, in the order in which they lie. `fd` is the file, open for reading.

    Raises `CheckpointError` where the format forbids what the header says, or a dtype is not known.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            entries = [(name, file.get_slice(name)) for name in file.offset_keys()]
            found = [(name, view.get_dtype(), tuple(view.get_shape())) for name, view in entries]
    except (SafetensorError, OSError, ValueError) as error:
        raise fault(path, "a safetensors file", error) from error
    offset = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
    tensors = {}
    for name, code, shape in found:
        if code not in DTYPES:
            known = "/".join(DTYPES)
            raise fault(path, f"tensor {name!r} of dtype {known}", repr(code), "this format is not supported")
        nbytes = math.prod(shape) * DTYPES[code].itemsize
        tensors[name] = TensorInfo(name=name, dtype=DTYPES[code], shape=shape, path=path, offset=offset, nbytes=nbytes)
        offset += nbytes
    if offset != os.fstat(fd).st_size:
        raise fault(path, f"a file of {offset} bytes by its header", f"{os.fstat(fd).st_size} bytes")
    return tensors
