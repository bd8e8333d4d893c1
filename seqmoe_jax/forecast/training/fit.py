"""The training loop: updates, validations, early stopping, checkpoints, log lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seqmoe_jax.errors import PredictorError
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.data import Steps
from seqmoe_jax.forecast.evaluation.metrics import validate
from seqmoe_jax.forecast.training.config import TrainConfig
from seqmoe_jax.forecast.training.update import start, train_update


class TrainResult(NamedTuple):
    """The best parameters of a run, in float32 on the host, the update they are from, and the records of the run."""

    params: Any
    update: int
    history: list[dict[str, float]]


def fit(
    config: PredictorConfig,
    training: TrainConfig,
    steps: Steps,
    validation: Steps | None,
    *,
    seed: int = 0,
    weights: dict[str, Any] | None = None,
    teachers: Any = None,
    stop: int | None = None,
    checkpoints: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] = lambda done, updates: None,
) -> TrainResult:
    """Trains, and keeps the moving average of the weights that validates best (recall at K + 3, next and refined).

    Without `validation` the last average is kept. `weights` are those to begin with (default: random ones); `teachers`
    are parameters stacked along a new first axis, whose mean forecasts are learned too. `stop` ends the run after so
    many updates, on the schedule of `training.updates`.
    With `checkpoints` a directory, the run goes on from the latest checkpoint there, which the caller knows to be of
    the same predictor, configuration, seed and data. `progress` gets the updates done and all updates. Raises
    `PredictorError` where the loss is not a number, and `OutputError` where a checkpoint cannot be written.
    """
    updates = training.updates if stop is None else min(stop, training.updates)
    begun = time.perf_counter()
    state = start(config, training, seed, weights)
    # This generator is the hardware's own. Noise takes a good part of the time of an update.
    key = jax.random.key(seed + 1, impl="rbg")
    best, best_update, best_params = -np.inf, 0, None
    history: list[dict[str, float]] = []
    saved = None
    if checkpoints is not None:
        from seqmoe_jax.forecast.training.checkpoints import Checkpoints  # orbax takes a second to import

        saved = Checkpoints(checkpoints)
        restored = saved.restore(state)
        if restored is not None:
            state, best, best_update, best_params, history = restored
            log(f"resuming after update {int(state.update)}")
    patience = training.patience * training.validate_every
    for update in range(int(state.update), updates):
        if best_params is not None and update % training.validate_every == 0 and update >= best_update + patience:
            log(f"stopped: no better validation since update {best_update}")
            break
        state, losses = train_update(config, training, state, steps, teachers, key)
        done = update + 1
        progress(done, updates)
        if done % training.validate_every and done != updates:
            continue
        record = {name: round(float(value), 4) for name, value in losses.items()}
        if not np.isfinite(record["loss"]):
            raise PredictorError(f"the loss is {record['loss']} after {done} updates; lower the learning rate")
        record |= {"update": done, "seconds": round(time.perf_counter() - begun, 1)}
        score = float(done)
        if validation is not None:
            following, refined = validate(config, state.average, validation, bfloat16=training.bfloat16)
            record |= {"recall": round(following, 4), "recall_refined": round(refined, 4)}
            score = (following + refined) / 2
        history.append(record)
        log(" ".join(f"{name} {value}" for name, value in record.items()))
        if score > best:
            best, best_update = score, done
            best_params = jax.tree.map(jnp.copy, state.average)
        if saved is not None:
            saved.save(state, best, best_update, best_params, history)
    return TrainResult(jax.device_get(best_params), best_update, history)
