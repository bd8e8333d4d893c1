"""Training checkpoints (orbax): all that a killed run needs to go on."""

from __future__ import annotations

import gc
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from seqmoe_jax.errors import OutputError, PredictorError
from seqmoe_jax.forecast.training.update import TrainState

KEPT = 2


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
        story = {"best": best, "best_update": best_update, "history": history, "digest": _digest(leaves)}
        arrays = ocp.args.StandardSave(leaves)
        try:
            self._manager.save(
                int(state.update), args=ocp.args.Composite(arrays=arrays, story=ocp.args.JsonSave(story))
            )
            self._manager.wait_until_finished()
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
        """Raises `ValueError`, short, for whatever orbax and what it is made of raise over damaged files."""
        args = ocp.args.Composite(arrays=ocp.args.StandardRestore(shapes), story=ocp.args.JsonRestore())
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            got = self._manager.restore(step, args=args)
            arrays, story = got["arrays"], got["story"]
            if story["digest"] == _digest(arrays):
                return arrays, float(story["best"]), int(story["best_update"]), list(story["history"])
            reason = "its arrays are not those that were written"
        except Exception as error:
            reason = " ".join(str(error).split())[:100]
        finally:
            # The reads that orbax has begun end with the error that held them, with pages on standard error.
            gc.collect()
            sys.unraisablehook = hook
        raise ValueError(reason)


def _arrays(state: TrainState, best_params: Any) -> dict[str, Any]:
    """The leaves by number: NNX states and tuples of the optimiser differ between versions, their leaves do not."""
    return {f"{index:04d}": leaf for index, leaf in enumerate(jax.tree.leaves((state, best_params)))}


def _digest(arrays: Mapping[str, Any]) -> int:
    """Of the bytes of all arrays: what a disk got wrong in the middle of one shows nowhere else."""
    digest = 0
    for name in sorted(arrays):
        digest = zlib.crc32(np.ascontiguousarray(arrays[name]).view(np.uint8).data, digest)
    return digest


def checkpoint_bytes(state: Any) -> int:
    """Of a checkpoint of such a state: it has the parameters of the best validation beside it."""
    arrays = _arrays(state, state.average)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in arrays.values())
