"""What a long run has done so far, beside its result: a killed run goes on from there and keeps what is finished."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from seqmoe_jax.errors import ConfigError, OutputError
from seqmoe_jax.inputs import read_json
from seqmoe_jax.outputs.files import reason_of, write_text
from seqmoe_jax.outputs.runs import Run, differences, to_json

LOCK, RUN = "lock", "run.json"


@contextmanager
def parts_of(out: Path, run: Run, *, force: bool, restart: bool = False) -> Iterator[Path]:
    """The directory `OUT.parts` for the block alone, which is removed once the block has ended without an error.

    Parts of another run are refused, or with `force` removed; those of this one are there, unless with `restart`.
    Raises `OutputError`, also where another process is at the same result.
    """
    directory = parts_directory(out)
    try:
        lock = _locked(directory)
    except BlockingIOError:
        raise OutputError(f"{out}: another process is writing it; wait for it, or choose another name") from None
    except OSError as error:
        raise OutputError(f"{directory}: cannot be written: {reason_of(error)}") from error
    try:
        _claim(directory, run, force=force, restart=restart)
        yield directory
        _remove(_kept(directory))
    finally:
        try:
            if not _kept(directory):  # all is done, or nothing
                # In this order: whoever is killed leaves no parts that do not say whose they are.
                _remove([directory / RUN, directory / LOCK])
                with suppress(OSError):  # another process has taken it already
                    directory.rmdir()
        finally:
            os.close(lock)


def parts_directory(out: Path) -> Path:
    # Of a link, what it leads to: the parts are renamed into place and so must be on its file system.
    target = Path(os.path.realpath(out))
    return target.with_name(target.name + ".parts")


def check_parts(out: Path) -> None:
    """Raises `OutputError` where `parts_of` could not make its directory."""
    directory = parts_directory(out)
    try:
        there = os.stat(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputError(f"{directory}: cannot be written: {reason_of(error)}") from None
    if not stat.S_ISDIR(there.st_mode):
        raise OutputError(
            f"{directory} is no directory: what is done so far goes there; choose another name than {out}"
        )


def _claim(directory: Path, run: Run, *, force: bool, restart: bool) -> None:
    """Leaves parts of this run alone in the directory."""
    there = directory / RUN
    other = differences(_run_of(there), run)
    _remove(list(directory.glob("*.partial")))  # what a process was writing when it was killed
    kept = _kept(directory)
    if kept and other and not (force or restart):
        raise OutputError(
            f"{directory} has parts of another run ({other}): --force begins anew, or choose another name"
        )
    if other or restart:
        _remove(kept)
    write_text(there, to_json(run))


def _kept(directory: Path) -> list[Path]:
    return [path for path in directory.glob("*") if path.name not in (LOCK, RUN)]


def _remove(paths: list[Path]) -> None:
    for path in paths:
        with suppress(FileNotFoundError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _run_of(path: Path) -> Run:
    """Empty where the parts do not say whose they are."""
    try:
        return read_json(path)
    except ConfigError:
        return {}


def _locked(directory: Path) -> int:
    """Makes the directory and takes it for this process; the lock ends with the process, however that ends."""
    while True:
        directory.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # who had it has just removed it
            lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                _lock(lock)
                if os.path.samestat(os.fstat(lock), os.stat(directory / LOCK)):
                    return lock
                os.close(lock)
            except BaseException:
                os.close(lock)
                raise


def _lock(file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        pass
