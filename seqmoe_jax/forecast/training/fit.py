"""The training loop: updates, validations, early stopping, checkpoints, log lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seqmoe_jax.errors import PredictorError
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.data import Steps
from seqmoe_jax.forecast.evaluation.metrics import validate
from seqmoe_jax.forecast.training.train import Plan, Recipe, start, train_update


class Result(NamedTuple):
    """The best parameters of a run, in float32 on the host, and its story."""

    params: Any
    score: float
    update: int
    history: list[dict[str, float]]
    seconds: float


def fit(
    config: PredictorConfig,
    plan: Plan,
    recipe: Recipe,
    steps: Steps,
    validation: Steps | None,
    *,
    seed: int = 0,
    weights: dict[str, Any] | None = None,
    teachers: Any = None,
    sampled: bool = False,
    stop: int | None = None,
    checkpoints: Path | None = None,
    run: Mapping[str, Any] | None = None,
    log: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] = lambda done, updates: None,
) -> Result:
    """Trains; keeps the moving average of the weights that validates best (recall at K + 3, next plus refined).

    Without `validation` the last weights are kept: for a final run on everything, of a length found before. `stop`
    ends a run early on the schedule of a longer one.
    With `checkpoints` a directory, the run goes on from the latest checkpoint there, which must be of the same
    predictor, recipe, seed and `run` (what the caller knows of the data). `progress` gets updates done and in all.
    Raises `PredictorError` where the loss is not a number.
    """
    updates = min(int(recipe.updates), stop or int(recipe.updates))
    about = {"recipe": jax.tree.map(float, recipe)._asdict() | {"rates": None}, "rates": list(map(float, recipe.rates))}
    about |= {"batch": plan.batch, "window": plan.window, "seed": seed, **(run or {})}
    recipe = jax.tree.map(jnp.float32, recipe)
    begun = time.perf_counter()
    state = start(config, seed, weights)
    # The hardware's own generator: noise is a good part of an update's work.
    key = jax.random.key(seed + 1, impl="rbg")
    best, best_update, best_params = -np.inf, 0, None
    history: list[dict[str, float]] = []
    saved = None
    if checkpoints is not None:
        from seqmoe_jax.forecast.training.checkpoints import Checkpoints  # orbax takes a second to import

        saved = Checkpoints(checkpoints, config, about)
        restored = saved.restore(state)
        if restored is not None:
            state, best, best_update, best_params, history = restored
            log(f"resuming after update {int(state.update)}")
    for update in range(int(state.update), updates):
        if update >= best_update + plan.patience * plan.every and best_params is not None and update % plan.every == 0:
            log(f"stopped: no better validation since update {best_update}")
            break
        state, parts = train_update(config, plan, sampled, state, steps, recipe, teachers, key)
        done = update + 1
        progress(done, updates)
        if done % plan.every and done != updates:
            continue
        record = {name: round(float(value), 4) for name, value in parts.items()}
        if not np.isfinite(record["loss"]):
            raise PredictorError(f"the loss is {record['loss']} after {done} updates; lower the learning rate")
        record |= {"update": done, "seconds": round(time.perf_counter() - begun, 1)}
        score = float(done)
        if validation is not None:
            recall = validate(config, state.average, validation, plan.bfloat16)
            record |= {"recall": round(recall["next"], 4), "recall_refined": round(recall["refined"], 4)}
            score = (recall["next"] + recall["refined"]) / 2
        history.append(record)
        log(" ".join(f"{name} {value}" for name, value in record.items()))
        if score > best:
            best, best_update = score, done
            best_params = jax.tree.map(jnp.copy, state.average)
        if saved is not None:
            saved.save(state, best, best_update, best_params, history)
    return Result(jax.device_get(best_params), best, best_update, history, time.perf_counter() - begun)
