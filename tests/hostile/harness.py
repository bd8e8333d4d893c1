"""Puts damaged inputs before a reader: it may read them or refuse them in one line, and nothing else."""

from __future__ import annotations

import json
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from seqmoe_jax.errors import MOST_LINE, SeqMoEError

# Of processor time for one input: more is a hang. Some systems count as such what a busy machine makes a process wait;
# so there is a second time.
CPU_SECONDS = (20, 60)
GROWTH = 1 << 30  # bytes that reading may take more than before


@dataclass(frozen=True, kw_only=True)
class Reader:
    """`attempt` spoils a good input by what it draws and reads it. `share`: how many inputs for one of the others."""

    name: str
    attempt: Callable[[Random], None]
    share: float = 1.0


@dataclass(kw_only=True)
class Count:
    """What became of the inputs of a reader."""

    read: int = 0
    refused: int = 0
    failed: list[str] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return self.read + self.refused + len(self.failed)


class HangError(BaseException):
    """An input took too long. Not an `Exception`, so that no reader takes it for a fault of its input."""


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise HangError(f"more than {seconds} s of CPU time")

    former = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, former)


def _attempt(reader: Reader, seed: int, seconds: float) -> None:
    with _limited(seconds):
        reader.attempt(Random(f"{reader.name} {seed}"))


def try_one(reader: Reader, seed: int, count: Count) -> None:
    """One input, which the seed tells."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    try:
        try:
            _attempt(reader, seed, CPU_SECONDS[0])
        except HangError:
            _attempt(reader, seed, CPU_SECONDS[1])
        count.read += 1
    except SeqMoEError as error:
        line = str(error)
        if line.isprintable() and 0 < len(line) <= MOST_LINE:
            count.refused += 1
        else:
            count.failed.append(f"{reader.name}, input {seed}: not one line: {line[:200]!r}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        count.failed.append(f"{reader.name}, input {seed}: {type(error).__name__}: {str(error)[:200]}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
    if grown > GROWTH:
        count.failed.append(f"{reader.name}, input {seed}: took {grown >> 20} MiB")


def try_many(reader: Reader, inputs: int) -> Count:
    """So many inputs, always the same."""
    count = Count()
    for seed in range(inputs):
        try_one(reader, seed, count)
    return count


def try_for(reader: Reader, seconds: float, first: int = 0) -> Count:
    """Inputs from seed `first` on, for as long as that."""
    count, end = Count(), time.monotonic() + seconds
    while time.monotonic() < end:
        try_one(reader, first, count)
        first += 1
    return count


def row(name: str, count: Count) -> str:
    """A line of the table in docs/reliability.md."""
    return f"| {name} | {count.tried:,} | {count.read:,} | {count.refused:,} | {len(count.failed)} |"


def as_json(counts: dict[str, Count]) -> str:
    return json.dumps({name: vars(count) for name, count in counts.items()}, indent=1)
