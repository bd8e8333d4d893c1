"""Training checkpoints (orbax): all that a killed run needs to go on."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from seqmoe_jax.errors import OutputError, PredictorError
from seqmoe_jax.forecast.training.update import TrainState
from seqmoe_jax.inputs import is_file, read_json
from seqmoe_jax.outputs.files import write_text

KEPT = 2
# In the directory of a checkpoint, written last: the CRC-32 of each of its files.
CHECKSUMS = "checksums.json"


class Checkpoints:
    """The two latest checkpoints of one run in a directory."""

    def __init__(self, directory: Path):
        self._directory = directory.resolve()
        self._directory.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT)
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def save(
        self, state: TrainState, best: float, best_update: int, best_params: Any, history: list[dict[str, float]]
    ) -> None:
        """Raises `OutputError`: those written before stay."""
        leaves = _arrays(state, best_params)
        story = {"best": best, "best_update": best_update, "history": history}
        arrays = ocp.args.StandardSave(leaves)
        try:
            self._manager.save(
                int(state.update), args=ocp.args.Composite(arrays=arrays, story=ocp.args.JsonSave(story))
            )
            self._manager.wait_until_finished()
            written = self._directory / str(int(state.update))
            write_text(written / CHECKSUMS, json.dumps(_checksums(written)))
        except Exception as error:  # a full disk has several types and long messages here
            reason = " ".join(str(error).split())[-200:]
            raise OutputError(
                f"{self._directory}: no checkpoint could be written ({reason}); those before it are there: make room "
                "and run it again"
            ) from error

    def restore(self, like: TrainState) -> tuple[TrainState, float, int, Any, list[dict[str, float]]] | None:
        """The latest checkpoint in the shapes of `like`, or None where there is none.

        Raises `PredictorError` where it is damaged.
        """
        latest = self._manager.latest_step()
        if latest is None:
            return None
        try:
            arrays, best, best_update, history = self._read(latest, _arrays(like, like.average))
        except ValueError as error:
            raise PredictorError(
                f"{self._directory / str(latest)}: this checkpoint of training is damaged ({error}); delete that "
                "directory to go on from the one before it, or begin anew with --restart"
            ) from None
        leaves = [jnp.asarray(arrays[name]) for name in sorted(arrays)]
        state, best_params = jax.tree.unflatten(jax.tree.structure((like, like.average)), leaves)
        return state, best, best_update, best_params, history

    def _read(self, step: int, shapes: dict[str, Any]) -> tuple[dict[str, Any], float, int, list[dict[str, float]]]:
        """Raises `ValueError`, short, for damaged files and whatever orbax and what it is made of raise over them."""
        args = ocp.args.Composite(arrays=ocp.args.StandardRestore(shapes), story=ocp.args.JsonRestore())
        try:
            _check(self._directory / str(step))
            got = self._manager.restore(step, args=args)
            arrays, story = got["arrays"], got["story"]
            return arrays, float(story["best"]), int(story["best_update"]), list(story["history"])
        except Exception as error:
            raise ValueError(" ".join(str(error).split())[:100]) from None


def _arrays(state: TrainState, best_params: Any) -> dict[str, Any]:
    """The leaves by number: NNX states and tuples of the optimiser differ between versions, their leaves do not."""
    return {f"{index:04d}": leaf for index, leaf in enumerate(jax.tree.leaves((state, best_params)))}


def _checksums(directory: Path) -> dict[str, int]:
    """Of every file in the directory of a checkpoint, by its path in there."""
    paths = (path for path in directory.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    return {str(path.relative_to(directory)): zlib.crc32(path.read_bytes()) for path in paths}


def _check(directory: Path) -> None:
    """Raises `ValueError` for files that are not as they were written.

    Before orbax sees them: it does not notice what a disk got wrong in the middle of an array, and of what it notices
    the reads it has begun go on in threads, which write pages on standard error. A process that was killed between the
    last file and the checksums leaves none; such a checkpoint is read as it is.
    """
    if not is_file(directory / CHECKSUMS):
        return
    found, expected = _checksums(directory), read_json(directory / CHECKSUMS, error=PredictorError)
    changed = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if changed:
        raise ValueError(f"{changed[0]} is not as it was written")


def checkpoint_bytes(state: Any) -> int:
    """Of a checkpoint of such a state: it has the parameters of the best validation beside it."""
    arrays = _arrays(state, state.average)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in arrays.values())
