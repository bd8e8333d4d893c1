"""Reading and writing `npz` files of plain arrays."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from seqmoe_jax.errors import TraceError


def read_arrays(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """The arrays by name; `TraceError` where there is no such file (of `what`) or where it cannot be read."""
    if not Path(path).is_file():
        raise TraceError(f"no {what} {path}")
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, KeyError, AttributeError, zipfile.BadZipFile) as error:
        raise TraceError(f"{path} is not a readable npz file: {error}") from None


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, Any], *, compressed: bool) -> None:
    """The file appears whole or not at all."""
    partial = Path(f"{os.fspath(path)}.partial")
    with partial.open("wb") as file:
        (np.savez_compressed if compressed else np.savez)(file, **arrays)
    os.replace(partial, path)
