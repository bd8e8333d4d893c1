"""Training checkpoints (orbax): all that a killed run needs to go on, and a description of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from seqmoe_jax.errors import PredictorError
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.training.update import TrainState


class Checkpoints:
    """The two latest checkpoints of one run in a directory.

    Beside them lie `predictor.json`, the predictor's configuration, and `run.json`, what else the run depends on.
    Raises `PredictorError` where the directory holds checkpoints of another predictor or run.
    """

    def __init__(self, directory: Path, config: PredictorConfig, run: Mapping[str, Any]):
        directory = directory.resolve()
        directory.mkdir(parents=True, exist_ok=True)
        advice = "choose an empty directory, or start anew with --restart"
        predictor, about = directory / "predictor.json", directory / "run.json"
        if predictor.exists() and predictor.read_text() != config.to_json():
            raise PredictorError(f"{directory} holds checkpoints of another predictor; {advice}")
        before = json.loads(about.read_text()) if about.exists() else dict(run)
        other = [name for name, value in run.items() if before.get(name) != value]
        if other:
            raise PredictorError(f"{directory} holds checkpoints of a run with another {other[0]}; {advice}")
        predictor.write_text(config.to_json())
        about.write_text(json.dumps(dict(run)))
        self._manager = ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(max_to_keep=2))

    def save(
        self, state: TrainState, best: float, best_update: int, best_params: Any, history: list[dict[str, float]]
    ) -> None:
        story = {"best": best, "best_update": best_update, "history": history}
        self._manager.save(
            int(state.update),
            args=ocp.args.Composite(
                arrays=ocp.args.StandardSave(_arrays(state, best_params)), story=ocp.args.JsonSave(story)
            ),
        )
        self._manager.wait_until_finished()

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
