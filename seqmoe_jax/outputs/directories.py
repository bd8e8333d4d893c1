"""Results of several files: the directory is made elsewhere and renamed, so that it appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from seqmoe_jax.errors import OutputError
from seqmoe_jax.outputs.files import check_directory_takes, is_mounted, partial_name, reason_of


def check_directory(path: Path, *, mine: tuple[str, ...], needed: int = 0) -> None:
    """Raises `OutputError` where no directory of `needed` bytes can be written or replaced.

    `mine` are patterns of the names that such a result consists of: a directory with others in it is never replaced.
    """
    target = _target(path)
    if target.is_dir():
        others = sorted(each.name for each in target.iterdir() if not any(each.match(pattern) for pattern in mine))
        if others:
            raise OutputError(f"{path} has other files in it ({others[0]}): give the name of a new directory")
    check_directory_takes(target.parent, path, needed)


def make_directory(path: Path) -> None:
    """A directory that results go into, and those above it, unless they are there. Raises `OutputError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: this directory cannot be made: {reason_of(error)}") from None


@contextmanager
def writing_directory(path: Path, *, beside: Path) -> Iterator[Path]:
    """A new directory inside `beside`, which becomes `path` once the block has ended without an error.

    `beside` is on the same file system. What was at `path` is lost. Raises `OutputError`.
    """
    target = _target(path)
    staged, former = partial_name(beside), partial_name(beside)
    try:
        staged.mkdir()
        yield staged
        with suppress(FileNotFoundError):
            os.rename(target, former)
        try:
            os.rename(staged, target)
        except BaseException:
            with suppress(FileNotFoundError):
                os.rename(former, target)
            raise
        shutil.rmtree(former, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {reason_of(error)}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _target(path: Path) -> Path:
    """The directory that a name leads to, links followed; it need not exist. Raises `OutputError`."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return Path(os.path.realpath(path))
    except (OSError, ValueError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        raise OutputError(f"{path}: cannot be written: {reason}") from None
    target = Path(os.path.realpath(path))
    if not target.is_dir():
        raise OutputError(f"{path} is no directory: give the name of one that is to be written")
    if is_mounted(target) or target in (Path.cwd(), *Path.cwd().parents):
        raise OutputError(f"{path} cannot be replaced where it is: give the name of a directory in it")
    if not os.access(target, os.W_OK):
        raise OutputError(f"{path}: is write-protected")
    return target
