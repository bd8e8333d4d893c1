"""How often a token recurs within a sequence, and what the routing of its earlier occurrence says of the later one.

    python -m scripts.echo_statistics T.npz --split train

This is what the predictor's echo rests on (`forecast/features.py`). Recall here is of the K routed experts among the K
of the step looked up, over decoded steps that have one.
"""

from __future__ import annotations

import argparse

import numpy as np

from seqmoe_jax.forecast.features import CONTEXT, echo_steps
from seqmoe_jax.traces.format import Trace, read_trace


def recall(trace: Trace, source: np.ndarray, steps: np.ndarray) -> float:
    """Share of the experts of `steps` that their `source` steps routed to as well."""
    same = trace.ids[steps][..., :, None] == trace.ids[source[steps]][..., None, :]
    return float(same.any(-1).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--split", default="train")
    parser.add_argument("--window", type=int, default=512, help="steps searched (default: 512)")
    args = parser.parse_args()
    trace = read_trace(args.trace)
    trace = trace.select(args.split) if trace.split is not None else trace
    counted = trace.decoded() & ~trace.first_steps()
    last = np.arange(trace.steps) - 1
    print(f"{int(counted.sum())} decoded steps of split {args.split}, the first of each sequence left out")
    for longest in range(1, CONTEXT + 1):
        source = echo_steps(trace.tok, trace.seq_offsets, args.window, longest=longest)
        steps = np.flatnonzero(counted & (source >= 0))
        print(
            f"contexts of up to {longest}: {len(steps) / counted.sum():.3f} of the steps have an echo; recall there "
            f"{recall(trace, source, steps):.3f}, of the step before {recall(trace, last, steps):.3f}"
        )


if __name__ == "__main__":
    main()
