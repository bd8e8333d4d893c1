"""The host's memory: how much there is, and JAX's pinned arrays as NumPy sees them."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Array, Shaped

Progress = Callable[[int, int], None]  # is told, as work goes on: how much is done, how much there is in all (bytes)


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """What this process may have, in bytes; None where nobody can say before it is used."""

    total: int | None
    available: int | None  # of it, now

    def lacks(self, needed: int, what: str) -> str | None:
        """Why `what`, which needs so much, does not fit; None if it does, or may."""
        for limit, said in ((self.total, "there are"), (self.available, "free are")):
            if limit is not None and needed > limit:
                return f"{what} need {needed / 1e9:.2f} GB of host memory, {said} {limit / 1e9:.2f} GB"
        return None


def host_memory(root: Path = Path("/")) -> HostMemory:
    """That of this machine, or of the control group that this process is in.

    A virtual machine may be given memory when it uses it: it says little of what it can have, and is not held to what
    it says.
    """
    pages = os.sysconf("SC_PAGE_SIZE")
    total, available = pages * os.sysconf("SC_PHYS_PAGES"), _sizes(root / "proc/meminfo").get("MemAvailable")
    # Pages that a balloon holds are present, if not counted yet; those still to be plugged in are neither.
    present = pages * sum(map(int, re.findall(r"^ +present +(\d+)$", _text(root / "proc/zoneinfo"), re.MULTILINE)))
    plugged = any((root / "sys/bus/virtio/drivers/virtio_mem").glob("virtio*"))
    whole = None if plugged else max(total, present)
    if plugged or present > 1.1 * total:
        available = None
    limits = [limit for limit in (whole, _group_limit(root)) if limit is not None]
    return HostMemory(total=min(limits, default=None), available=available)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another system, or not ours to read
        return ""


def _sizes(path: Path) -> dict[str, int]:
    """A table of names and sizes in kB, such as /proc/meminfo, in bytes."""
    return {name: 1024 * int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB$", _text(path), re.MULTILINE)}


def _group_limit(root: Path) -> int | None:
    """The least of the limits of this process's control group and those around it."""
    top = root / "sys/fs/cgroup"
    group = re.search(r"^0::/(.*)$", _text(root / "proc/self/cgroup"), re.MULTILINE)
    inner = top / group[1] if group else top
    files = [folder / "memory.max" for folder in (inner, *inner.parents) if folder.is_relative_to(top)]
    found = [text for file in files if (text := _text(file).strip()).isdecimal()]
    return min(map(int, found), default=None)


def host_view(array: Shaped[Array, "*shape"]) -> Shaped[np.ndarray, "*shape"]:
    """An array in host memory as a writable NumPy array of its shape and dtype over the same bytes, without a copy.

    The view keeps the array alive. JAX takes arrays to be constant: write before anything reads the array, or where
    its reader expects that.
    """
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    memory.owner = array  # type: ignore[attr-defined]
    return np.frombuffer(memoryview(memory), np.uint8).view(array.dtype).reshape(array.shape)
