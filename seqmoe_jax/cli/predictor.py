"""`seqmoe train-predictor` and `seqmoe evaluate`."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqmoe_jax.errors import PredictorError

if TYPE_CHECKING:
    from seqmoe_jax.forecast.config import PredictorConfig
    from seqmoe_jax.forecast.evaluation.evaluate import Row
    from seqmoe_jax.traces.format import Trace

    Predictor = tuple[PredictorConfig, dict[str, Any]]  # what `store.load` gives

Log = Callable[[str], None]


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="T.npz", help="expert activations, as `seqmoe trace` records them")
    add("--out", type=Path, required=True, metavar="DIR", help="gets the predictor, its evaluation and checkpoints")
    add("--model", metavar="ID", help="the model that the trace is of (default: what the trace says)")
    add("--inputs", choices=["activations", "activations+token"], default="activations+token")
    add("--width", type=int, default=640, metavar="D", help="width of the Mamba2 blocks (default: 640)")
    add("--blocks", type=int, default=2, metavar="N")
    add("--token-width", type=int, default=96, metavar="N", help="width of a token's embedding (default: 96)")
    add("--refine-width", type=int, default=768, metavar="N", help="of the mid-step refinement (default: 768)")
    add("--echo", type=int, default=512, metavar="STEPS", help="searched for an earlier use of a token (default: 512)")
    add("--updates", type=int, default=600, metavar="N", help="at most; early stopping may end it before")
    add("--batch", type=int, default=16, metavar="B", help="sequences per update (default: 16)")
    add("--window", type=int, default=512, metavar="STEPS", help="longest part of a sequence in it (default: 512)")
    add("--learning-rate", type=float, default=2e-3, metavar="RATE", help="at its highest (default: 2e-3)")
    add("--sampled-updates", type=int, metavar="N", help="of scheduled sampling after it, 0: none (default: 0.4 of "
        "the updates)")  # fmt: skip
    add("--seed", type=int, default=0)
    add("--restart", action="store_true", help="do not go on from the checkpoints in DIR")
    add("--json", action="store_true", help="machine-readable output")


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="T.npz", help="expert activations, as `seqmoe trace` records them")
    add("--predictor", default="none", metavar="auto|DIR|none", help="'auto': the one that ships; default: none")
    add("--model", metavar="ID", help="the model that the trace is of (default: what the trace says)")
    add("--split", default="test", help="sequences to evaluate on (default: test)")
    add("--trigger", type=int, metavar="M", help="layer of the mid-step refinement (default: L/2)")
    add("--json", action="store_true", help="machine-readable output")


def parts_of(trace: Trace, split: str) -> tuple[Trace, Trace]:
    """(sequences to fit on, sequences to evaluate on): the splits of the trace, else a tenth held out."""
    from seqmoe_jax.forecast.data import divide

    if trace.split is None:
        return divide(trace)
    return trace.select("train"), trace.select(split)


def evaluation(
    fitted: Trace, held: Trace, predictor: Predictor | None, *, model: str | None, trigger: int | None = None, log: Log
) -> dict[str, Row]:
    """Rows of the recall table on `held`: the baselines, fitted on `fitted`, and a predictor."""
    from seqmoe_jax.forecast.config import PredictorConfig
    from seqmoe_jax.forecast.data import prepare
    from seqmoe_jax.forecast.evaluation.baselines import baselines
    from seqmoe_jax.forecast.evaluation.evaluate import evaluate_baseline, evaluate_predictor
    from seqmoe_jax.forecast.evaluation.metrics import params_of

    bare = PredictorConfig(
        model=model or "", layers=held.layers, experts=held.num_experts, active=held.active, inputs="activations"
    )
    steps = prepare(held, bare, None)
    rows = {}
    for name, scores in baselines(prepare(fitted, bare, None), bare).items():
        log(f"evaluating {name} on {int(held.decoded().sum())} steps")
        rows[name] = evaluate_baseline(bare, scores, steps)
    if predictor is not None:
        config, weights = predictor
        log(f"evaluating the predictor ({config.inputs})")
        steps = prepare(held, config, weights.get("token_table"))
        params = params_of(config, weights)
        rows[config.inputs] = evaluate_predictor(config, params, weights, steps, trigger=trigger)
    return rows


def evaluate(args: argparse.Namespace) -> int:
    from seqmoe_jax.forecast import store
    from seqmoe_jax.forecast.evaluation.cost import cost, describe
    from seqmoe_jax.forecast.evaluation.evaluate import table
    from seqmoe_jax.traces.format import read_trace

    trace = read_trace(args.trace)
    model = args.model or trace.model
    predictor = None
    if args.predictor != "none":
        predictor = store.load(store.require_predictor(args.predictor, model, **trace.sizes))
    fitted, held = parts_of(trace, args.split)
    log = _logger(args)
    rows = evaluation(fitted, held, predictor, model=model, trigger=args.trigger, log=log)
    said: dict[str, Any] = {"predictors": rows}
    if predictor is not None:
        said["cost"] = cost(predictor[0])._asdict()
    print(json.dumps(said) if args.json else table(rows))
    if predictor is not None and not args.json:
        print(describe(cost(predictor[0])))
    return 0


def train(args: argparse.Namespace) -> int:
    import jax
    import numpy as np
    from tqdm import tqdm

    from seqmoe_jax.forecast import store
    from seqmoe_jax.forecast.config import PredictorConfig
    from seqmoe_jax.forecast.data import divide, prepare
    from seqmoe_jax.forecast.evaluation.cost import cost
    from seqmoe_jax.forecast.evaluation.evaluate import table
    from seqmoe_jax.forecast.features import FIRST_ROW, token_table
    from seqmoe_jax.forecast.training.fit import Result, fit
    from seqmoe_jax.forecast.training.train import Plan, Recipe, weights_of
    from seqmoe_jax.traces.format import read_trace

    _check_training(args)
    trace = read_trace(args.trace)
    whole = trace if trace.split is None else trace.select("train")
    part, validation = divide(whole)
    if min(part.lens.max(), validation.lens.max()) < 2:
        raise PredictorError("training needs sequences of at least 2 steps: a step is forecast from the one before it")
    tokens, vocabulary = None, 0
    if args.inputs == "activations+token":
        vocabulary = trace.vocab_size or int(trace.tok.max()) + 1
        tokens = token_table(part.tok, vocabulary)
    config = PredictorConfig(
        model=args.model or trace.model or "unnamed",
        layers=trace.layers, experts=trace.num_experts, active=trace.active, inputs=args.inputs,
        width=args.width, blocks=args.blocks, vocabulary=vocabulary, token_width=args.token_width, echo=args.echo,
        refine_width=args.refine_width, token_rows=FIRST_ROW if tokens is None else int(tokens.max()) + 1,
    )  # fmt: skip
    log = _logger(args)
    log(f"training on {part.steps} steps, stopping early on {validation.steps} of the same split")
    steps, held = prepare(part, config, tokens), prepare(validation, config, tokens)
    longest = -(-int(part.lens.max()) // 64) * 64
    plan = Plan(batch=args.batch, window=min(args.window, longest), every=50, bfloat16=jax.default_backend() != "cpu")
    recipe = Recipe(updates=args.updates, learning_rate=args.learning_rate)
    checkpoints = _checkpoints(args)
    about = {"trace": hashlib.sha256(whole.ids.tobytes() + whole.tok.tobytes()).hexdigest()[:16]}

    def run(name: str, recipe: Recipe, **options: Any) -> Result:
        with tqdm(unit="update", disable=args.json or not sys.stderr.isatty(), leave=False, desc=name) as bar:

            def progress(done: int, updates: int) -> None:
                bar.total = updates
                bar.update(done - bar.n)

            return fit(config, plan, recipe, steps, held, checkpoints=checkpoints / name, run=about, log=log,
                       progress=progress, **options)  # fmt: skip

    result = run("forced", recipe, seed=args.seed)
    updates = {"forced": result.update}  # those that the best validation came after
    more = int(0.4 * args.updates) if args.sampled_updates is None else args.sampled_updates
    if more:
        log("scheduled sampling")
        slower = recipe._replace(updates=more, learning_rate=0.3 * args.learning_rate)
        weights = weights_of(config, result.params)
        result = run("sampled", slower, seed=args.seed + 1, weights=weights, sampled=True)
        updates["sampled"] = result.update
    weights = weights_of(config, result.params)
    store.save(args.out, config, jax.device_get(weights) | {"popularity": whole.popularity()}, tokens)
    # What is stored is what is evaluated: its weights are rounded to bfloat16.
    predictor = store.load(args.out)
    others = [] if trace.split is None else [str(name) for name in np.unique(trace.split) if name != "train"]
    said: dict[str, Any] = {"updates": updates, "cost": cost(config)._asdict(), "splits": {}}
    for name in others or ["validation"]:
        there = trace.select(name) if others else validation
        log(f"split {name}")
        rows = evaluation(part, there, predictor, model=config.model, log=log)
        said["splits"][name] = {"predictors": rows}
        if not args.json:
            print(f"{name}\n{table(rows)}")
    (args.out / store.EVALUATION).write_text(json.dumps(said, indent=1) + "\n")
    if args.json:
        print(json.dumps(said))
    return 0


def _check_training(args: argparse.Namespace) -> None:
    least = {
        "updates": 1,
        "batch": 1,
        "window": 32,
        "token_width": 1,
        "refine_width": 1,
        "echo": 0,
        "sampled_updates": 0,
    }
    for name, lowest in least.items():
        value = getattr(args, name)
        if value is not None and value < lowest:
            raise PredictorError(f"--{name.replace('_', '-')} must be at least {lowest}, got {value}")
    if not 0 < args.learning_rate < 1:
        raise PredictorError(f"--learning-rate must be above 0 and below 1, got {args.learning_rate}")


def _checkpoints(args: argparse.Namespace) -> Path:
    import shutil

    directory = args.out / "checkpoints"
    if args.restart and directory.exists():
        shutil.rmtree(directory)
    return directory


def _logger(args: argparse.Namespace) -> Log:
    if args.json:
        return lambda line: None
    return lambda line: print(line, file=sys.stderr, flush=True)
