"""`seqmoe stretch-trace`: routing of a recorded model made into that of a larger shape.

The benchmark stretches a trace itself, to the same rows; only training a predictor for the larger shape needs the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from seqmoe_jax.cli.arguments import add_force, add_json, output, positive
from seqmoe_jax.outputs.runs import check_replaced, to_json

if TYPE_CHECKING:
    from seqmoe_jax.traces.format import Trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="T.npz", help="expert activations, as `seqmoe trace` records them")
    add("--layers", type=positive, required=True, metavar="L", help="MoE layers of the larger shape")
    add("--experts", type=positive, required=True, metavar="E", help="experts of a layer")
    add("--active", type=positive, required=True, metavar="K", help="experts that a token activates in a layer")
    add("--model", metavar="ID", help="what the file calls the model (default: stretched-LxExK)")
    add("--train-steps", type=positive, metavar="N", help="keep about N steps of the split train, for a smaller file")
    add("--out", type=output, required=True, metavar="S.npz")
    add_force(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    import numpy as np

    from seqmoe_jax.traces.format import read_run, read_trace, write_trace
    from seqmoe_jax.traces.stretch import stretch

    check_replaced(args.out, "trace", read_run, force=args.force)
    trace = read_trace(args.trace)
    name = args.model or f"stretched-{args.layers}x{args.experts}x{args.active}"
    sizes = {"layers": args.layers, "experts": args.experts, "active": args.active}
    run = {"model": name, "stretched": trace.digest, **sizes, "train_steps": args.train_steps}
    check_replaced(args.out, "trace", read_run, run, force=args.force)
    if args.train_steps is not None and trace.split is not None:
        trace = fewer(trace, args.train_steps)
    trace = stretch(trace, **sizes)
    metadata = {**trace.metadata, "model": np.asarray(name), "run": np.asarray(to_json(run))}
    trace = dataclasses.replace(trace, metadata=metadata)
    write_trace(args.out, trace)
    said = {"trace": str(args.out), "model": name, "sequences": trace.sequences, "steps": trace.steps, **trace.sizes}
    if args.json:
        print(json.dumps(said))
    else:
        size = args.out.stat().st_size / 1e6
        print(f"{args.out}: {trace.sequences} sequences of {name}, {trace.steps} steps, {size:.1f} MB")
    return 0


def fewer(trace: Trace, steps: int) -> Trace:
    """Without some sequences of the split `train`, evenly spread, so that it has about so many steps."""
    import numpy as np

    train = np.flatnonzero(trace.split == "train")
    total = int(trace.lens[train].sum())
    if total <= steps:
        return trace
    kept = train[np.unique(np.linspace(0, len(train) - 1, max(1, len(train) * steps // total)).astype(int))]
    return trace.take(np.sort(np.concatenate([kept, np.flatnonzero(trace.split != "train")])))
