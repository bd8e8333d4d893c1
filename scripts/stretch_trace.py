"""Routing of a recorded model made into that of a larger shape (`seqmoe_jax.traces.stretch` says by which rule).

    python scripts/stretch_trace.py T.npz --layers 48 --experts 128 --active 8 --out STRETCHED.npz
    python -m scripts.train_predictors STRETCHED.npz --model stretched-48x128x8 --out TRAINED
    python -m scripts.install_predictor TRAINED --to DIR
    seqmoe bench qwen3-30b-a3b-fp8 --replay T.npz --split test --predictor DIR

The benchmark stretches the trace itself, to the same rows; only training needs the file. Every split is stretched by
itself. `--train-steps` leaves out sequences of the split `train` for a smaller file.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np

from seqmoe_jax.traces.format import Trace, read_trace, write_trace
from seqmoe_jax.traces.stretch import stretch


def fewer(trace: Trace, steps: int) -> Trace:
    """Without some sequences of the split `train`, evenly spread, so that it has about so many steps."""
    assert trace.split is not None
    train = np.flatnonzero(trace.split == "train")
    total = int(trace.lens[train].sum())
    if total <= steps:
        return trace
    kept = train[np.unique(np.linspace(0, len(train) - 1, max(1, len(train) * steps // total)).astype(int))]
    return trace.take(np.sort(np.concatenate([kept, np.flatnonzero(trace.split != "train")])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("trace", type=Path)
    add("--layers", type=int, required=True)
    add("--experts", type=int, required=True)
    add("--active", type=int, required=True)
    add("--model", help="its name in the file (default: stretched-LxExK)")
    add("--train-steps", type=int, metavar="N", help="keep about N steps of the split train")
    add("--out", type=Path, required=True)
    args = parser.parse_args()
    trace = read_trace(args.trace)
    if args.train_steps is not None and trace.split is not None:
        trace = fewer(trace, args.train_steps)
    stretched = stretch(trace, layers=args.layers, experts=args.experts, active=args.active)
    name = args.model or f"stretched-{args.layers}x{args.experts}x{args.active}"
    stretched = dataclasses.replace(stretched, metadata={**stretched.metadata, "model": np.asarray(name)})
    write_trace(args.out, stretched)
    print(
        f"{args.out}: {stretched.sequences} sequences, {stretched.steps} steps, {args.out.stat().st_size / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
