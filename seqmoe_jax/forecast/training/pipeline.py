"""From a trace to a stored predictor and its evaluation."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seqmoe_jax.errors import ConfigError, PredictorError
from seqmoe_jax.forecast import store
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.data import divide, prepare
from seqmoe_jax.forecast.evaluation.cost import cost
from seqmoe_jax.forecast.evaluation.evaluate import recall_rows
from seqmoe_jax.forecast.features import FIRST_ROW, token_table
from seqmoe_jax.forecast.predictor import weights_of
from seqmoe_jax.forecast.training.checkpoints import KEPT, checkpoint_bytes
from seqmoe_jax.forecast.training.config import TrainConfig
from seqmoe_jax.forecast.training.fit import TrainResult, fit
from seqmoe_jax.forecast.training.update import start
from seqmoe_jax.inputs import read_json
from seqmoe_jax.outputs.directories import check_directory, writing_directory
from seqmoe_jax.outputs.files import write_text
from seqmoe_jax.outputs.parts import check_parts, parts_of
from seqmoe_jax.outputs.runs import Run, check_replaced, is_of
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
    force: bool,
    log: Callable[[str], None],
    progress: Callable[[str], AbstractContextManager[Callable[[int, int], None]]],
) -> dict[str, Any]:
    """Trains on split `train` of a trace (on all of one without splits); writes predictor and evaluation to `out`.

    Teacher forcing comes first, then `sampled_updates` (None: 0.4 of the updates) of scheduled sampling. `teachers`
    predictors are trained before that, if there are any, and the predictor learns from their mean forecasts too. A
    tenth of the sequences is held out for early stopping, unless `stop_at` says after which share of its updates each
    run ends. Runs go on from their checkpoints, beside `out`, and end at once where `out` has this very predictor,
    unless `restart` is set; anything else at `out` is replaced with `force` alone. `sizes` are further fields of
    `PredictorConfig`. `progress` opens a display for the run of a name, which is called with the updates done and all
    updates. Returns the evaluation. Raises `PredictorError` or `OutputError`.
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
    longest = -(-int(fitted.lens.max()) // 64) * 64
    training = dataclasses.replace(training, window=min(training.window, longest))
    made_by = {
        "trace": trace.digest, **dataclasses.asdict(config), **dataclasses.asdict(training), "seed": seed,
        "sampled_updates": sampled_updates, "teachers": teachers, "stop_at": stop_at,
    }  # fmt: skip
    check_output(out, made_by, needed=needed_bytes(config, training), force=force)
    with parts_of(out, made_by, force=force, restart=restart) as checkpoints:
        if not restart and is_of(store.read_run(out), made_by) and (done := _evaluation(out)):
            return done
        held = "nothing held out" if validation is None else f"stopping early on {validation.steps} of the same split"
        log(f"training on {fitted.steps} steps, {held}")
        steps = prepare(fitted, config, tokens)
        held_out = None if validation is None else prepare(validation, config, tokens)
        updates: dict[str, int] = {}  # those that the best validation of each run came after

        def run(name: str, training: TrainConfig, **options: Any) -> TrainResult:
            log(name)
            stop = None if stop_at is None else max(1, round(stop_at * training.updates))
            with progress(name) as advance:
                result = fit(config, training, steps, held_out, stop=stop, checkpoints=checkpoints / name,
                             log=log, progress=advance, **options)  # fmt: skip
            updates[name] = result.update
            return result

        result = _stages(config, training, run, seed=seed, teachers=teachers, sampled_updates=sampled_updates)
        weights = jax.device_get(weights_of(config, result.params)) | {"popularity": whole.popularity()}
        with writing_directory(out, beside=checkpoints) as staged:
            store.save(staged, config, weights, tokens, run=made_by)
            # The stored predictor is evaluated: its weights are rounded to bfloat16.
            predictor = store.load(staged)
            evaluation: dict[str, Any] = {"updates": updates, "cost": cost(config)._asdict(), "splits": {}}
            for name in others or ["validation"]:
                log(f"split {name}")
                on = trace.select(name) if validation is None or others else validation
                evaluation["splits"][name] = {"predictors": recall_rows(fitted, on, predictor, log=log)}
            write_text(staged / store.EVALUATION, json.dumps(evaluation, indent=1) + "\n")
    return evaluation


def check_output(out: Path, run: Run | None = None, *, needed: int = 0, force: bool) -> None:
    """Raises `OutputError` where no predictor can go, of a known `run` or, while that is not known, of any."""
    check_directory(out, mine=store.FILES, needed=needed)
    check_parts(out)
    check_replaced(out, "predictor", store.read_run, run, force=force)


def _evaluation(directory: Path) -> dict[str, Any] | None:
    """What is stored beside a predictor, if it is."""
    try:
        evaluation = read_json(directory / store.EVALUATION)
        return evaluation if "splits" in evaluation else None
    except ConfigError:
        return None


def needed_bytes(config: PredictorConfig, training: TrainConfig) -> int:
    """Room for the checkpoints of a stage, one of which is written before another goes."""
    return (KEPT + 1) * checkpoint_bytes(jax.eval_shape(functools.partial(start, config, training, 0)))


def _stages(
    config: PredictorConfig,
    training: TrainConfig,
    run: Callable[..., TrainResult],
    *,
    seed: int,
    teachers: int,
    sampled_updates: int | None,
) -> TrainResult:
    """What is trained one after the other, each by `run`; the last is the predictor."""
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
    return result
