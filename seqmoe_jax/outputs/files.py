"""Files appear whole or not at all: they are written beside, under a name of this process, and renamed.

`check_file` finds before the work what would fail after it.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from seqmoe_jax.errors import OutputError

PROBE_BYTES = 4096  # a full disk takes an empty file, but not these
_NOT_FILES = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def check_file(path: str | os.PathLike[str], *, needed: int = 0) -> None:
    """Raises `OutputError` where no file of `needed` bytes can be written: better before hours of work than after."""
    check_directory_takes(_target(path).parent, path, needed)


@contextmanager
def writing(path: str | os.PathLike[str], *, beside: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write to, which gets the name `path` once the block has ended without an error, else leaves nothing.

    Until then it is in `beside`, a directory of the same file system, or where it will be: there a process that is
    killed leaves it.

    A link is followed and what it leads to replaced. A new file's permissions follow the umask; one that is replaced
    leaves its own. Raises `OutputError`, also for a disk that is full.
    """
    target = _target(path)
    partial = partial_name(target.parent if beside is None else beside)
    try:
        # Not `tempfile`, which makes files that nobody else may read.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(descriptor, "wb") as file:
            with suppress(OSError):  # nothing to keep, or a file system without permissions
                os.fchmod(descriptor, stat.S_IMODE(os.stat(target).st_mode))
            yield file
            file.flush()
            os.fsync(descriptor)
        os.replace(partial, _target(path))  # what is there may have become a device since
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {reason_of(error)}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """A file of text in UTF-8, as `writing` does it."""
    with writing(path) as file:
        file.write(text.encode("utf-8"))


def partial_name(directory: Path) -> Path:
    """A name in a directory that no other process has; short, as the name of the result may be as long as can be."""
    return directory / f".seqmoe-{os.getpid()}-{secrets.token_hex(4)}.partial"


def check_directory_takes(directory: Path, path: str | os.PathLike[str], needed: int) -> None:
    """Raises `OutputError` where nothing can be written into the directory that the output `path` goes to."""
    if not directory.is_dir():
        is_file = directory.exists()
        raise OutputError(f"{path}: {directory} is no directory" if is_file else f"{path}: no directory {directory}")
    try:
        with open(_open_probe(directory), "wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        room = os.statvfs(directory)
    except OSError as error:
        raise OutputError(f"{path}: nothing can be written into {directory}: {reason_of(error)}") from error
    free = room.f_bavail * room.f_frsize
    if free < needed:
        raise OutputError(
            f"{path}: needs about {needed / 1e6:.0f} MB, but {directory} has {free / 1e6:.0f} MB free; make room, or "
            "write elsewhere"
        )


def _open_probe(directory: Path) -> int:
    """A file without a name, which nobody has to remove."""
    with suppress(OSError, AttributeError):  # not every file system has them
        return os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    probe = partial_name(directory)
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    probe.unlink()
    return descriptor


def reason_of(error: OSError) -> str:
    """What the system says, and what to do where that is plain."""
    advice = {errno.ENOSPC: "; make room and run it again", errno.EDQUOT: "; make room and run it again"}
    return f"{error.strerror or error}{advice.get(error.errno or 0, '')}"


def is_mounted(path: Path) -> bool:
    """Whether something is mounted there (as containers do with single files too), so that it cannot be renamed."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return os.path.ismount(path)
    return str(path).replace(" ", "\\040") in {line.split()[4] for line in lines}


def _target(path: str | os.PathLike[str]) -> Path:
    """The regular file that a name leads to, links followed; it need not exist. Raises `OutputError`."""
    name = os.fspath(path)
    if not name or name.endswith(os.sep):
        raise OutputError(f"expected the name of a file to write, got {name!r}")
    try:
        found = os.stat(name)
    except FileNotFoundError:  # also a link to what is not there yet
        return Path(os.path.realpath(name))
    except OSError as error:
        raise OutputError(f"{name}: cannot be written: {reason_of(error)}") from None
    except ValueError as error:
        raise OutputError(f"{name!r}: cannot be written: {error}") from None
    for is_kind, what in _NOT_FILES:
        if is_kind(found.st_mode):
            raise OutputError(f"{name} is {what}: expected the name of a file")
    target = Path(os.path.realpath(name))
    # A name under /proc may lead to a file that has none any more.
    if not (target.exists() and os.path.samestat(os.stat(target), found)) or is_mounted(target):
        raise OutputError(f"{name}: cannot be replaced where it is; write to another name")
    if not os.access(target, os.W_OK):
        raise OutputError(f"{name}: is write-protected")
    return target
