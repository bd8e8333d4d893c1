"""`seqmoe train-predictor` and `seqmoe evaluate`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from seqmoe_jax.cli.arguments import add_force, add_json, integer_from, natural, positive, share


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="T.npz", help="expert activations, as `seqmoe trace` records them")
    add("--out", type=Path, required=True, metavar="DIR", help="gets the predictor and its evaluation; the checkpoints "
        "until then are in DIR.parts")  # fmt: skip
    add("--model", metavar="ID", help="the model that the trace is of (default: what the trace says)")
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
    add("--batch", type=positive, default=16, metavar="B", help="sequences per update (default: 16)")
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
    add("--seed", type=natural, default=0)
    add("--restart", action="store_true", help="do not go on from the checkpoints of a run that was killed")
    add_force(parser)
    add_json(parser)


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="T.npz", help="expert activations, as `seqmoe trace` records them")
    add("--predictor", default="none", metavar="auto|DIR|none", help="'auto': the one that ships; default: none")
    add("--model", metavar="ID", help="the model that the trace is of (default: what the trace says)")
    add("--split", default="test", help="sequences to evaluate on (default: test)")
    add("--trigger", type=natural, metavar="M", help="layer of the mid-step refinement (default: L/2)")
    add_json(parser)


def evaluate(args: argparse.Namespace) -> int:
    from seqmoe_jax.forecast import store
    from seqmoe_jax.forecast.data import divide
    from seqmoe_jax.forecast.evaluation.cost import cost, describe
    from seqmoe_jax.forecast.evaluation.evaluate import recall_rows, table
    from seqmoe_jax.traces.format import read_trace

    trace = read_trace(args.trace)
    predictor = None
    if args.predictor != "none":
        directory = store.require_predictor(args.predictor, args.model or trace.model, **trace.sizes)
        predictor = store.load(directory)
    fitted, held = divide(trace) if trace.split is None else (trace.select("train"), trace.select(args.split))
    rows = recall_rows(fitted, held, predictor, trigger=args.trigger, log=_logger(args))
    if args.json:
        costs = {} if predictor is None else {"cost": cost(predictor[0])._asdict()}
        print(json.dumps({"predictors": rows} | costs))
        return 0
    print(table(rows))
    if predictor is not None:
        print(describe(cost(predictor[0])))
    return 0


def train(args: argparse.Namespace) -> int:
    import jax
    from tqdm import tqdm

    from seqmoe_jax.forecast.evaluation.evaluate import table
    from seqmoe_jax.forecast.training.config import TrainConfig
    from seqmoe_jax.forecast.training.pipeline import check_output, train_predictor
    from seqmoe_jax.traces.format import read_trace

    check_output(args.out, force=args.force)

    @contextlib.contextmanager
    def progress(name: str) -> Iterator[Callable[[int, int], None]]:
        with tqdm(unit="update", disable=args.json or not sys.stderr.isatty(), leave=False, desc=name) as bar:

            def advance(done: int, updates: int) -> None:
                bar.total = updates
                bar.update(done - bar.n)

            yield advance

    trace = read_trace(args.trace)
    evaluation = train_predictor(
        trace,
        args.out,
        model=args.model or trace.model or "unnamed",
        inputs=args.inputs,
        sizes={
            "d_model": args.width,
            "blocks": args.blocks,
            "token_width": args.token_width,
            "echo": args.echo,
            "refine_width": args.refine_width,
        },
        training=TrainConfig(
            updates=args.updates,
            batch=args.batch,
            window=args.window,
            learning_rate=args.learning_rate,
            bfloat16=jax.default_backend() != "cpu",
        ),
        seed=args.seed,
        sampled_updates=args.sampled_updates,
        teachers=args.teachers,
        stop_at=args.stop_at,
        restart=args.restart,
        force=args.force,
        log=_logger(args),
        progress=progress,
    )
    if args.json:
        print(json.dumps(evaluation))
        return 0
    for name, split in evaluation["splits"].items():
        print(f"{name}\n{table(split['predictors'])}")
    return 0


def _logger(args: argparse.Namespace) -> Callable[[str], None]:
    if args.json:
        return lambda line: None
    return lambda line: print(line, file=sys.stderr, flush=True)
