"""Writes a predictor's forecasts over a trace, for `seqmoe simulate --forecasts`.

    python -m scripts.export_forecasts PREDICTOR TRACE.npz --split test --out F.npz

PREDICTOR is a directory, or "auto" for the one that ships.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from seqmoe_jax.errors import SeqMoEError
from seqmoe_jax.forecast import store
from seqmoe_jax.forecast.evaluation.export import forecasts_of
from seqmoe_jax.traces.forecasts import write_forecasts
from seqmoe_jax.traces.format import read_trace


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("predictor")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--split")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="for predictor 'auto' (default: what the trace says)")
    parser.add_argument("--stem", default="predictor", help="name of the files before the part number")
    parser.add_argument("--trigger", type=int, help="layer of the mid-step forecast (default: L/2)")
    parser.add_argument("--rollout", type=int, default=7, help="steps beyond the coming one (0: none)")
    parser.add_argument("--retention", type=int, default=0, help="which retention score, where there are several")
    args = parser.parse_args()
    try:
        trace = read_trace(args.trace)
        directory = Path(args.predictor)
        if args.predictor == "auto":
            directory = store.require_predictor("auto", args.model or trace.model, **trace.sizes)
        config, weights = store.load(directory, stem=args.stem)
        trace = trace.select(args.split) if args.split else trace
        forecasts = forecasts_of(
            config, weights, trace, trigger=args.trigger, rollout=args.rollout, retention=args.retention
        )
    except SeqMoEError as error:
        print(f"export_forecasts: {error}", file=sys.stderr)
        return 2
    write_forecasts(args.out, forecasts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
