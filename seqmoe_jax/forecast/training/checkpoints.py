"""Training checkpoints (orbax): all that a killed run needs to go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from seqmoe_jax.errors import OutputError
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
        story = {"best": best, "best_update": best_update, "history": history}
        arrays = ocp.args.StandardSave(_arrays(state, best_params))
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
        """The latest checkpoint in the shapes of `like`, or None where there is none."""
        latest = self._manager.latest_step()
        if latest is None:
            return None
        shapes = _arrays(like, like.average)
        got = self._manager.restore(
            latest,
            args=ocp.args.Composite(arrays=ocp.args.StandardRestore(shapes), story=ocp.args.JsonRestore()),
        )
        leaves = [jnp.asarray(got["arrays"][name]) for name in sorted(got["arrays"])]
        state, best_params = jax.tree.unflatten(jax.tree.structure((like, like.average)), leaves)
        story = got["story"]
        return state, story["best"], story["best_update"], best_params, story["history"]


def _arrays(state: TrainState, best_params: Any) -> dict[str, Any]:
    """The leaves by number: NNX states and tuples of the optimiser differ between versions, their leaves do not."""
    return {f"{index:04d}": leaf for index, leaf in enumerate(jax.tree.leaves((state, best_params)))}


def checkpoint_bytes(state: Any) -> int:
    """Of a checkpoint of such a state: it has the parameters of the best validation beside it."""
    arrays = _arrays(state, state.average)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in arrays.values())
