"""Reading and writing `npz` files of plain arrays.

A few bytes of such a file can ask for all memory there is, so what the headers say is checked before anything is
unpacked: that each array is as large as its shape, and all together not out of proportion to the file.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seqmoe_jax.errors import TraceError
from seqmoe_jax.inputs import check_file
from seqmoe_jax.outputs.files import writing

TEXT_BYTES = 1 << 20  # of a string that `read_text` reads, at most
MAX_RATIO = 64  # unpacked to packed bytes; routing shrinks to a half, and nothing that we write to less than a tenth
ALWAYS = 64 << 20  # bytes that any file may unpack to
MAX_ARRAYS = 1000


class Header(NamedTuple):
    """What a file says of an array before its data."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


Check = Callable[[Mapping[str, Any]], None]  # of headers, or of arrays; raises `TraceError`


def read_arrays(path: str | os.PathLike[str], what: str, check_headers: Check) -> dict[str, Any]:
    """The arrays of a file (of `what`) by name, numbers and strings. Raises `TraceError`.

    `check_headers` sees what the file says of shapes and dtypes; arrays are unpacked after it.
    """
    check_file(path, what, TraceError)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            _check_sizes(list(members.values()), os.path.getsize(path))
            check_headers({name: _read_header(archive, member) for name, member in members.items()})
            return {name: _read_array(archive, member) for name, member in members.items()}
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    except MemoryError:
        raise TraceError(f"{path}: expected {what} that fits into memory, got one that does not") from None
    except Exception as error:  # over damaged bytes zipfile, zlib and NumPy raise whatever comes
        reason = str(error) or type(error).__name__
        raise TraceError(f"{path}: expected {what}, got what is no readable npz file: {reason[:100]}") from None


def _check_sizes(members: list[zipfile.ZipInfo], packed: int) -> None:
    if len(members) > MAX_ARRAYS:
        raise TraceError(f"expected at most {MAX_ARRAYS} arrays, got {len(members)}")
    unpacked, most = sum(member.file_size for member in members), max(ALWAYS, MAX_RATIO * packed)
    if unpacked > most:
        raise TraceError(
            f"expected at most {most} bytes unpacked from {packed}, got {unpacked}; do not trust this file"
        )


def _read_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Header:
    with archive.open(member) as file:
        return _header_of(file, member.filename, member.file_size)


def _header_of(file: Any, name: str, size: int) -> Header:
    """That of an array which takes `size` bytes of a file with it."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    begin = file.tell()
    # Strings of no characters are arrays of no bytes, however many there are.
    if dtype.kind not in "biufUS" or not dtype.itemsize or min(shape, default=0) < 0:
        raise TraceError(f"{name}: expected numbers or strings, got {dtype} of shape {shape}")
    if begin + math.prod(shape) * dtype.itemsize != size:
        raise TraceError(f"{name}: shape {shape} of {dtype} is not the size of its {size} bytes")
    return Header(shape, dtype)


def array_of(data: bytes, name: str) -> np.ndarray:
    """The array in the bytes of an `.npy` file. Raises `TraceError`, and whatever NumPy raises over damaged ones."""
    _header_of(io.BytesIO(data), name, len(data))
    array: np.ndarray = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    return array


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(member) as file:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
        return array


def names_in(path: str | os.PathLike[str]) -> set[str]:
    """Of the arrays of a file, without reading one; none where it is no npz file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}
    except Exception:  # as in `read_arrays`
        return set()


def read_text(path: str | os.PathLike[str], name: str) -> str | None:
    """One short string of a file, without reading the rest; None where it has none of this name."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as member:
            array = np.lib.format.read_array(io.BytesIO(member.read(TEXT_BYTES)), allow_pickle=False)
    except Exception:
        return None
    return str(array) if array.dtype.kind == "U" and array.ndim == 0 else None


def write_arrays(
    path: str | os.PathLike[str], arrays: Mapping[str, Any], *, compressed: bool, beside: Path | None = None
) -> None:
    """The file appears whole or not at all; until then it is in the directory `beside`. Raises `OutputError`."""
    with writing(path, beside=beside) as file:
        (np.savez_compressed if compressed else np.savez)(file, **arrays)
