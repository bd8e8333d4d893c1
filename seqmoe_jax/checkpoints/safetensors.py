"""Reads tensors of a checkpoint directory straight from its safetensors files: no torch, no memory map.

Bytes come by positioned reads into memory that the caller owns, so nothing but the destination counts towards
the process's memory, and reads from many threads run at once (the GIL is released in each).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, KeysView, Mapping
from pathlib import Path, PurePosixPath
from types import TracebackType

import numpy as np

from seqmoe_jax.checkpoints.header import TensorInfo, fault, read_header
from seqmoe_jax.checkpoints.others import other_weights
from seqmoe_jax.errors import CheckpointError
from seqmoe_jax.inputs import MAX_INDEX, check_file, is_file, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_READ = 1 << 30  # the kernel moves at most 2 GiB - 4 KiB a call


class Checkpoint:
    """The tensors of one model directory, by name. Its files stay open until `close` or the object's end.

    Threads may read at the same time, but none while `close` runs.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, TensorInfo], files: dict[Path, int]):
        self.directory = directory
        self._tensors = dict(tensors)
        self._files = files
        self.close: Callable[[], object] = weakref.finalize(self, _close_all, files)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def names(self) -> KeysView[str]:
        return self._tensors.keys()

    def info(self, name: str) -> TensorInfo:
        """Raises `CheckpointError` for a tensor that is not there."""
        try:
            return self._tensors[name]
        except KeyError:
            raise fault(self.directory, f"a tensor {name!r}", "none of that name", "is this the right model?") from None

    def read_into(self, name: str, out: memoryview | np.ndarray, byte_offset: int = 0) -> None:
        """Fills `out` (contiguous, writable) with the tensor's bytes from `byte_offset` on.

        Raises `ValueError` where the range is not inside the tensor, `CheckpointError` where the file ends
        early.
        """
        info = self.info(name)
        if isinstance(out, np.ndarray):
            if not out.flags.c_contiguous:
                raise ValueError(f"cannot read into an array with strides {out.strides}: expected a contiguous one")
            out = out.reshape(-1).view(np.uint8).data
        view = out.cast("B") if out.nbytes else memoryview(b"")
        if byte_offset < 0 or byte_offset + len(view) > info.nbytes:
            raise ValueError(
                f"tensor {name!r} has {info.nbytes} bytes: cannot read {len(view)} from byte {byte_offset}"
            )
        fd = self._files.get(info.path)
        if fd is None:
            raise CheckpointError(f"{self.directory}: expected an open checkpoint, got a closed one; open it again")
        read_exactly(fd, info.path, view, info.offset + byte_offset)


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Opens `model.safetensors`, or the shards of `model.safetensors.index.json`, and checks every header.

    Reads headers only. Raises `CheckpointError` in one line for anything missing or damaged.
    """
    directory = Path(directory)
    if not os.path.isdir(directory):
        raise CheckpointError(f"{directory}: expected a model directory, got no such directory; check the path")
    tensors: dict[str, TensorInfo] = {}
    files: dict[Path, int] = {}
    try:
        if is_file(directory / SINGLE):
            tensors = _open_file(directory / SINGLE, files)
        elif is_file(directory / INDEX):
            tensors = _open_shards(directory, files)
        else:
            came, advice = other_weights(directory) or ("neither", "check the path, or download the weights too")
            raise fault(directory, f"{SINGLE} or {INDEX}", came, advice)
    except BaseException:
        _close_all(files)
        raise
    return Checkpoint(directory, tensors, files)


def read_exactly(fd: int, path: Path, view: memoryview, offset: int) -> None:
    """Positioned reads until `view` is full. Raises `CheckpointError` where the file ends first."""
    done = 0
    while done < len(view):
        part = view[done : done + MAX_READ]
        try:
            got = os.preadv(fd, [part], offset + done)
        except OSError as error:
            raise fault(path, f"to read {len(part)} bytes at {offset + done}", error.strerror) from error
        if got == 0:
            came = f"its end at byte {offset + done}"
            raise fault(path, f"data up to byte {offset + len(view)}", came)
        done += got


def _close_all(files: dict[Path, int]) -> None:
    while files:
        os.close(files.popitem()[1])


def _open_file(path: Path, files: dict[Path, int]) -> dict[str, TensorInfo]:
    check_file(path, "a safetensors file", CheckpointError)
    try:
        files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise fault(path, "a readable file", error.strerror, "check the path and its permissions") from error
    return read_header(path, files[path])


def _open_shards(directory: Path, files: dict[Path, int]) -> dict[str, TensorInfo]:
    index = directory / INDEX
    weight_map = _weight_map(index)
    shards = {}
    for shard in sorted(set(weight_map.values())):
        path = directory / shard
        if not os.path.isfile(path):  # false too of a name that is too long, a loop of links, a pipe
            raise fault(index, f"a shard {shard!r} beside it", "no such file", "download the missing shard")
        shards[shard] = _open_file(path, files)
    absent = [name for name, shard in weight_map.items() if name not in shards[shard]]
    if absent:
        came = f"{len(absent)} that are not in theirs ({', '.join(map(repr, absent[:3]))})"
        raise fault(index, "every tensor in the shard the index names", came)
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index, most=MAX_INDEX, error=CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise fault(index, "a weight_map of tensor names to shards", "none")
    for shard in weight_map.values():
        # Links are fine (the Hugging Face cache is made of them), names that lead out of the directory not.
        parts = PurePosixPath(shard).parts if isinstance(shard, str) else ()
        if len(parts) != 1 or parts[0] in ("..", "/") or "\\" in shard or "\0" in shard:
            raise fault(index, "shards named by plain file names", repr(shard)[:80], "do not trust this checkpoint")
    return weight_map
