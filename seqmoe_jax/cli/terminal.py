"""What people see: standard streams that may be closed, broken, full, or of another encoding than UTF-8."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from seqmoe_jax.errors import OutputError
from seqmoe_jax.outputs.files import reason_of

BROKEN_PIPE = 141  # the exit status of a program that SIGPIPE ends


def open_streams() -> None:
    """Streams that are closed lead to nowhere; characters that an encoding does not have become `?`."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # else the next file that is opened would get what libraries print
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115  # until the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


@contextmanager
def flushed() -> Iterator[None]:
    """What was printed has gone out at the end, where a fault of it can be told. Raises `OutputError`."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        _print_nowhere()
        if error.filename is not None or isinstance(error, BrokenPipeError):
            raise
        raise OutputError(f"standard output: {reason_of(error)}") from error


def _print_nowhere() -> None:
    """Python flushes once more at its end, and would print a traceback."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def text(word: str) -> str:
    """A word of the command line as text: UTF-8 whatever the locale is, with U+FFFD for bytes that are none."""
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        return os.fsencode(word).decode("utf-8", "replace")
    return word
