"""From a trace to a stored predictor and its evaluation."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seqmoe_jax.errors import PredictorError
from seqmoe_jax.forecast import store
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.data import divide, prepare
from seqmoe_jax.forecast.evaluation.cost import cost
from seqmoe_jax.forecast.evaluation.evaluate import recall_rows
from seqmoe_jax.forecast.features import FIRST_ROW, token_table
from seqmoe_jax.forecast.predictor import weights_of
from seqmoe_jax.forecast.training.config import TrainConfig
from seqmoe_jax.forecast.training.fit import TrainResult, fit
from seqmoe_jax.traces.format import Trace

SAMPLING = 0.1  # `TrainConfig.sampling` of scheduled sampling


def train_predictor(
    trace: Trace,
    out: Path,
    *,
    model: str,
    inputs: str,
    sizes: Mapping[str, int],
    training: TrainConfig,
    seed: int,
    sampled_updates: int | None,
    teachers: int,
    stop_at: float | None,
    restart: bool,
    log: Callable[[str], None],
    progress: Callable[[str], AbstractContextManager[Callable[[int, int], None]]],
) -> dict[str, Any]:
    """Trains on split `train` of a trace (on all of one without splits); writes predictor, evaluation, checkpoints.

    Teacher forcing comes first, then `sampled_updates` (None: 0.4 of the updates) of scheduled sampling. `teachers`
    predictors are trained before that, if there are any, and the predictor learns from their mean forecasts too. A
    tenth of the sequences is held out for early stopping, unless `stop_at` says after which share of its updates each
    run ends. Runs go on from their checkpoints unless `restart` is set. `sizes` are further fields of
    `PredictorConfig`. `progress` opens a display for the run of a name, which is called with the updates done and all
    updates. Returns the evaluation. Raises `PredictorError`.
    """
    whole = trace if trace.split is None else trace.select("train")
    others = [] if trace.split is None else [str(name) for name in np.unique(trace.split) if name != "train"]
    if stop_at is not None and not others:
        raise PredictorError("--stop-at trains on all of split train; the trace needs another split to evaluate on")
    fitted, validation = (whole, None) if stop_at is not None else divide(whole)
    if min(part.lens.max() for part in (fitted, validation) if part is not None) < 2:
        raise PredictorError("training needs sequences of at least 2 steps: a step is forecast from the one before it")
    tokens, vocabulary = None, 0
    if inputs == "activations+token":
        vocabulary = trace.vocab_size or int(trace.tok.max()) + 1
        tokens = token_table(fitted.tok, vocabulary)
    config = PredictorConfig(
        model=model, **trace.sizes, inputs=inputs, vocabulary=vocabulary,
        token_rows=FIRST_ROW if tokens is None else int(tokens.max()) + 1, **sizes,
    )  # fmt: skip
    held = "nothing held out" if validation is None else f"stopping early on {validation.steps} of the same split"
    log(f"training on {fitted.steps} steps, {held}")
    steps = prepare(fitted, config, tokens)
    held_out = None if validation is None else prepare(validation, config, tokens)
    longest = -(-int(fitted.lens.max()) // 64) * 64
    training = dataclasses.replace(training, window=min(training.window, longest))
    digest = hashlib.sha256(whole.ids.tobytes() + whole.tok.tobytes()).hexdigest()[:16]
    about = {"trace": digest, "teachers": teachers, "stop_at": stop_at}
    checkpoints = out / "checkpoints"
    if restart:
        shutil.rmtree(checkpoints, ignore_errors=True)
    updates: dict[str, int] = {}  # those that the best validation of each run came after

    def run(name: str, training: TrainConfig, **options: Any) -> TrainResult:
        log(name)
        stop = None if stop_at is None else max(1, round(stop_at * training.updates))
        with progress(name) as advance:
            result = fit(config, training, steps, held_out, stop=stop, checkpoints=checkpoints / name,
                         run=about, log=log, progress=advance, **options)  # fmt: skip
        updates[name] = result.update
        return result

    if teachers:
        taught = [run(f"teacher-{index}", training, seed=seed + index).params for index in range(teachers)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *taught)
        # Learning from forecasts overfits later than learning from routing alone.
        longer = dataclasses.replace(training, updates=int(1.5 * training.updates))
        result = run("distilled", longer, seed=seed + teachers, teachers=stacked)
    else:
        result = run("forced", training, seed=seed)
    more = int(0.4 * training.updates) if sampled_updates is None else sampled_updates
    if more:
        slower = dataclasses.replace(
            training, updates=more, learning_rate=0.3 * training.learning_rate, sampling=SAMPLING
        )
        result = run("sampled", slower, seed=seed + teachers + 1, weights=weights_of(config, result.params))
    weights = jax.device_get(weights_of(config, result.params)) | {"popularity": whole.popularity()}
    store.save(out, config, weights, tokens)
    # The stored predictor is evaluated: its weights are rounded to bfloat16.
    predictor = store.load(out)
    evaluation: dict[str, Any] = {"updates": updates, "cost": cost(config)._asdict(), "splits": {}}
    for name in others or ["validation"]:
        log(f"split {name}")
        on = trace.select(name) if validation is None or others else validation
        evaluation["splits"][name] = {"predictors": recall_rows(fitted, on, predictor, log=log)}
    (out / store.EVALUATION).write_text(json.dumps(evaluation, indent=1) + "\n")
    return evaluation
