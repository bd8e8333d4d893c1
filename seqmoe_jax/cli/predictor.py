"""`seqmoe train-predictor` and `seqmoe evaluate`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from seqmoe_jax.cli.arguments import add_force, add_json, integer_from, natural, positive, share

# Options of `train_predictor` that are arguments by the same names.
TRAINING = (
    "model", "inputs", "width", "blocks", "token_width", "refine_width", "echo", "updates", "batch", "window",
    "learning_rate", "sampled_updates", "teachers", "stop_at", "seed", "restart", "force",
)  # fmt: skip


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="T.npz", help="expert activations, as `seqmoe trace` records them")
    add("--out", type=Path, required=True, metavar="DIR", help="gets the predictor and its evaluation; the checkpoints "
        "until then are in DIR.parts")  # fmt: skip
    add("--model", metavar="ID", help="the model that the trace is of (default: what the trace says)")
    add("--seed", type=natural, default=0)
    add_training_arguments(parser)
    add_force(parser)
    add_json(parser)


def add_training_arguments(parser: argparse._ActionsContainer, *, batch: str = "--batch") -> None:
    """What is trained and how: all but on which trace and where it goes. `batch`: the name of that option."""
    add = parser.add_argument
    add("--inputs", choices=["activations", "activations+token"], default="activations+token")
    add("--width", type=positive, default=640, metavar="D", help="width of the Mamba2 blocks (default: 640)")
    add("--blocks", type=positive, default=2, metavar="N")
    add("--token-width", type=positive, default=96, metavar="N", help="width of a token's embedding (default: 96)")
    add("--refine-width", type=positive, default=768, metavar="N", help="of the mid-step refinement (default: 768)")
    add(
        "--echo",
        type=natural,
        default=512,
        metavar="STEPS",
        help="searched for an earlier use of a token (default: 512)",
    )
    add("--updates", type=positive, default=600, metavar="N", help="at most; early stopping may end it before")
    add(batch, type=positive, default=16, metavar="B", help="sequences per update (default: 16)")
    add(
        "--window",
        type=integer_from(32),
        default=512,
        metavar="STEPS",
        help="longest part of a sequence in it (default: 512)",
    )
    add("--learning-rate", type=share, default=2e-3, metavar="RATE", help="at its highest (default: 2e-3)")
    add("--sampled-updates", type=natural, metavar="N", help="of scheduled sampling after it, 0: none (default: 0.4 of "
        "the updates)")  # fmt: skip
    add("--teachers", type=natural, default=0, metavar="N", help="predictors of other seeds that are trained first; "
        "the predictor learns from their mean forecasts too (default: 0)")  # fmt: skip
    add("--stop-at", type=share, metavar="SHARE", help="train on all of split `train` and end after this share of the "
        "updates, such as 0.75 (default: hold out a tenth and stop early)")  # fmt: skip
    add("--restart", action="store_true", help="do not go on from the checkpoints of a run that was killed")


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="T.npz", help="expert activations, as `seqmoe trace` records them")
    add(
        "--predictor",
        default="none",
        metavar="auto|DIR|none",
        help="'auto': as in `generate`; default: none",
    )
    add("--model", metavar="ID", help="the model that the trace is of (default: what the trace says)")
    add("--split", default="test", help="sequences to evaluate on (default: test)")
    add("--trigger", type=natural, metavar="M", help="layer of the mid-step refinement (default: L/2)")
    add_json(parser)


def evaluate(args: argparse.Namespace) -> int:
    from seqmoe_jax.forecast import store
    from seqmoe_jax.forecast.evaluation.cost import cost, describe
    from seqmoe_jax.research.predictors import evaluate
    from seqmoe_jax.traces.format import read_trace

    trace = read_trace(args.trace)
    said = evaluate(trace, args.predictor, split=args.split, model=args.model, trigger=args.trigger, log=logger(args))
    config = None
    if args.predictor != "none":
        config = store.read_config(store.require_predictor(args.predictor, args.model or trace.model, **trace.sizes))
    if args.json:
        costs = {} if config is None else {"cost": cost(config)._asdict()}
        print(json.dumps({"predictors": said.rows} | costs))
        return 0
    print(said)
    if config is not None:
        print(describe(cost(config)))
    return 0


def train(args: argparse.Namespace) -> int:
    from seqmoe_jax.forecast.training.pipeline import check_output
    from seqmoe_jax.research.predictors import train_predictor
    from seqmoe_jax.traces.format import read_trace

    check_output(args.out, force=args.force)
    options = {name: value for name, value in vars(args).items() if name in TRAINING}
    trained = train_predictor(
        read_trace(args.trace), args.out, progress=sys.stderr.isatty() and not args.json, log=logger(args), **options
    )
    print(json.dumps(trained.report) if args.json else trained)
    return 0


def logger(args: argparse.Namespace) -> Callable[[str], None]:
    if args.json:
        return lambda line: None
    return lambda line: print(line, file=sys.stderr, flush=True)
