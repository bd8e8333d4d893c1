"""What a differential test of model directories is made of: a directory, a change to it, and two readings of both.

A `Variant` writes a directory. `compare` has it read by transformers and by this package; either they agree (EQUAL), or
this package refuses in one line (REFUSED), or transformers itself cannot read it (UNREADABLE). Everything else is a
difference, and a fault.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

EQUAL, REFUSED, UNREADABLE, DIFFERENT = "equal", "refused", "unreadable", "DIFFERENT"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A directory that differs from a family's tiny checkpoint along one axis. `write` changes a copy in place.

    One of `words` must be in the refusal, if there is one: the name of the field that it is about.
    """

    family: str
    axis: str
    name: str
    write: Callable[[Path], object]
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.family}: {self.axis}: {self.name}"

    def make(self, base: Path, directory: Path) -> Path:
        shutil.copytree(base, directory)
        self.write(directory)
        return directory


@dataclass(frozen=True, kw_only=True)
class Verdict:
    variant: str
    kind: str
    reason: str = ""


def sampled(variants: Iterable[Variant], count: int, seed: int = 0) -> list[Variant]:
    """So many of them, the same at every run, and as many of each axis as can be."""
    axes: dict[str, list[Variant]] = {}
    for variant in variants:
        axes.setdefault(variant.axis, []).append(variant)
    random, chosen = Random(seed), []
    for axis in axes.values():
        random.shuffle(axis)
    while len(chosen) < count and any(axes.values()):
        chosen += [axis.pop() for axis in axes.values() if axis]
    return chosen[:count]


def read_config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def write_config(directory: Path, config: dict[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(config))


def changing(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    """A `write` that puts another `config.json` in the place of what is there."""
    return lambda directory: write_config(directory, change(read_config(directory)))


def counted(verdicts: Iterable[Verdict]) -> Iterator[str]:
    """How many there are of each kind, in words."""
    kinds = [verdict.kind for verdict in verdicts]
    for kind in (EQUAL, REFUSED, UNREADABLE, DIFFERENT):
        yield f"{kinds.count(kind)} {kind}"
