"""Which run a result is of: what was made by another one is replaced only where the user says so (`--force`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from seqmoe_jax.errors import OutputError, SeqMoEError
from seqmoe_jax.inputs import parse_json

Run = Mapping[str, Any]  # all that a result depends on, by the names that users know, as JSON values


def to_json(run: Run) -> str:
    return json.dumps(dict(run), sort_keys=True)


def from_json(text: str | bytes) -> Run | None:
    """The run that was written, or None where that is something else."""
    try:
        run = parse_json(text, "a run")
    except SeqMoEError:
        return None
    return run if isinstance(run, dict) else None


def check_replaced(
    path: str | Path, kind: str, read: Callable[[Path], Run | None], run: Run | None = None, *, force: bool
) -> None:
    """Raises `OutputError` where `path` has something that may not be replaced: all but a result of the same `run`.

    `read` gets the run of a result there, or None where that is no `kind` of result; without a `run` every result of
    this kind may be replaced. Nothing, and an empty file or directory, is always replaced; with `force` the rest is.
    """
    path = Path(path)
    if force or not path.exists() or _is_empty(path):
        return
    there = read(path)
    advice = "--force replaces it, or choose another name"
    if there is None:
        raise OutputError(f"{path} is there already and is no {kind}: {advice}")
    if run is not None and (other := differences(there, run)):
        raise OutputError(f"{path} has a {kind} of another run ({other}): {advice}")


def differences(there: Run, here: Run) -> str:
    """How two runs differ in words, empty where they do not: `batch 8 there, 4 here`."""
    if not there:
        return "it does not say which"
    here = json.loads(to_json(here))
    names = [name for name in here if there.get(name) != here[name]] + [name for name in there if name not in here]
    return ", ".join(_differ(name, there.get(name), here.get(name)) for name in names[:3])


def is_of(there: Run | None, run: Run) -> bool:
    """Whether a result that is there, if any, was made by this run."""
    return there is not None and not differences(there, run)


def _differ(name: str, there: Any, here: Any) -> str:
    if isinstance(there, dict) and isinstance(here, dict):
        return differences(there, here)
    said = [json.dumps(value) for value in (there, here)]
    return f"{name} {said[0]} there, {said[1]} here" if max(map(len, said)) <= 40 else f"different {name}"


def _is_empty(path: Path) -> bool:
    return not any(path.iterdir()) if path.is_dir() else path.stat().st_size == 0
