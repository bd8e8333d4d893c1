"""`seqmoe train-predictor` and `seqmoe evaluate`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqmoe_jax.errors import PredictorError

if TYPE_CHECKING:
    from seqmoe_jax.traces.format import Trace

Log = Callable[[str], None]


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="T.npz", help="expert activations, as `seqmoe trace` records them")
    add("--out", type=Path, required=True, metavar="DIR", help="gets the predictor, its evaluation and checkpoints")
    add("--model", default="unnamed", metavar="ID", help="the model that the trace is of")
    add("--inputs", choices=["activations", "activations+token"], default="activations+token")
    add("--width", type=int, default=640, metavar="D", help="width of the Mamba2 blocks (default: 640)")
    add("--blocks", type=int, default=2, metavar="N")
    add("--updates", type=int, default=600, metavar="N", help="at most; early stopping may end it before")
    add("--batch", type=int, default=16, metavar="B", help="sequences per update")
    add("--sampled-updates", type=int, metavar="N", help="of scheduled sampling after it (default: 0.4 of the updates)")
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


def evaluate(args: argparse.Namespace) -> int:
    from seqmoe_jax.forecast import store
    from seqmoe_jax.forecast.baselines import baselines
    from seqmoe_jax.forecast.config import PredictorConfig
    from seqmoe_jax.forecast.data import prepare
    from seqmoe_jax.forecast.evaluate import evaluate_baseline, evaluate_predictor, table
    from seqmoe_jax.forecast.metrics import params_of
    from seqmoe_jax.traces.format import read_trace

    trace = read_trace(args.trace)
    model = args.model or trace.model
    predictor = None
    if args.predictor != "none":
        predictor = store.load(store.require_predictor(args.predictor, model, **trace.sizes))
    fitted, held = parts_of(trace, args.split)
    log = _logger(args)
    bare = PredictorConfig(
        model=model or "", layers=trace.layers, experts=trace.num_experts, active=trace.active, inputs="activations"
    )
    steps = prepare(held, bare, None)
    rows = {}
    for name, scores in baselines(prepare(fitted, bare, None), bare).items():
        log(f"evaluating {name} on {held.steps} steps")
        rows[name] = evaluate_baseline(bare, scores, steps)
    if predictor is not None:
        config, weights = predictor
        log(f"evaluating the predictor ({config.inputs})")
        steps = prepare(held, config, weights.get("token_table"))
        rows[config.inputs] = evaluate_predictor(
            config, params_of(config, weights), weights, steps, trigger=args.trigger
        )
    _show(args, rows, table(rows))
    return 0


def train(args: argparse.Namespace) -> int:
    import jax

    from seqmoe_jax.forecast import store
    from seqmoe_jax.forecast.config import PredictorConfig
    from seqmoe_jax.forecast.data import divide, prepare
    from seqmoe_jax.forecast.evaluate import evaluate_predictor, table
    from seqmoe_jax.forecast.features import FIRST_ROW, token_table
    from seqmoe_jax.forecast.fit import fit
    from seqmoe_jax.forecast.training import Plan, Recipe, weights_of
    from seqmoe_jax.traces.format import read_trace

    if args.updates < 1 or args.batch < 1:
        raise PredictorError(f"--updates and --batch must be at least 1, got {args.updates} and {args.batch}")
    trace = read_trace(args.trace)
    whole = trace if trace.split is None else trace.select("train")
    part, validation = divide(whole)
    tokens, vocabulary = None, 0
    if args.inputs == "activations+token":
        vocabulary = trace.vocab_size or int(trace.tok.max()) + 1
        tokens = token_table(part.tok, vocabulary)
    config = PredictorConfig(
        model=args.model, layers=trace.layers, experts=trace.num_experts, active=trace.active, inputs=args.inputs,
        width=args.width, blocks=args.blocks, vocabulary=vocabulary,
        token_rows=FIRST_ROW if tokens is None else int(tokens.max()) + 1,
    )  # fmt: skip
    log = _logger(args)
    log(f"training on {part.steps} steps, stopping early on {validation.steps} of the same split")
    steps, held = prepare(part, config, tokens), prepare(validation, config, tokens)
    longest = -(-int(part.lens.max()) // 64) * 64
    plan = Plan(batch=args.batch, window=min(512, longest), every=50, bfloat16=jax.default_backend() != "cpu")
    recipe = Recipe(updates=args.updates)
    checkpoints = _checkpoints(args)
    result = fit(config, plan, recipe, steps, held, seed=args.seed, checkpoints=checkpoints / "forced", log=log)
    more = int(0.4 * args.updates) if args.sampled_updates is None else args.sampled_updates
    if more:
        log("scheduled sampling")
        result = fit(
            config, plan, recipe._replace(updates=more, learning_rate=0.3 * float(recipe.learning_rate)), steps, held,
            seed=args.seed + 1, weights=weights_of(config, result.params), sampled=True,
            checkpoints=checkpoints / "sampled", log=log,
        )  # fmt: skip
    weights = weights_of(config, result.params)
    store.save(args.out, config, jax.device_get(weights), tokens)
    rows: dict[str, Any] = {}
    names = ["validation"] if trace.split is None else sorted(set(trace.split.tolist()) - {"train"}) or ["validation"]
    for name in names:
        there = held if name == "validation" else prepare(trace.select(name), config, tokens)
        rows[f"{config.inputs}, {name}"] = evaluate_predictor(config, result.params, weights, there)
    (args.out / store.EVALUATION).write_text(json.dumps({"predictors": rows}, indent=1))
    _show(args, rows, table(rows))
    return 0


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


def _show(args: argparse.Namespace, rows: dict[str, Any], text: str) -> None:
    print(json.dumps({"predictors": rows}) if args.json else text)
