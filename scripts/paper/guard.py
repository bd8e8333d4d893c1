"""What a predictor that knows a trace, and one that was never trained, cost and give with and without the guard.

    python -m scripts.paper.guard TRACE.npz --predictor seqmoe_jax/predictors/gpt-oss-20b --out guard.json

Simulations of the engine (`seqmoe_jax.simulation.settings.like_engine`) beside its policy without a predictor.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from seqmoe_jax.forecast import store
from seqmoe_jax.forecast.evaluation.export import forecasts_of
from seqmoe_jax.forecast.predictor import Predictor
from seqmoe_jax.simulation.settings import Simulation, like_engine
from seqmoe_jax.simulation.simulator import simulate
from seqmoe_jax.traces.forecasts import Forecasts
from seqmoe_jax.traces.format import read_trace

SHOWN = ("share_of_full_load", "hit_rate", "unused_transfers_per_step", "predicted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--predictor", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--sequences", type=int, default=1000, help="of the split, the first (default: all)")
    parser.add_argument("--residency", type=float, nargs="+", default=[0.45, 0.25])
    parser.add_argument("--transfer-cost", type=float, nargs="+", default=[0.72, 3.0, 6.25])
    args = parser.parse_args()
    trace = read_trace(args.trace).select(args.split)
    trace = trace.take(np.arange(min(args.sequences, trace.sequences)))
    config, weights = store.load(args.predictor)
    fresh = jax.tree.map(np.asarray, Predictor(config, rngs=nnx.Rngs(0)).weights())
    untrained = fresh | {"token_table": weights["token_table"]}
    forecasts = {
        name: forecasts_of(config, given, trace, rollout=0)
        for name, given in (("trained", weights), ("untrained", untrained))
    }
    rows: list[dict[str, Any]] = []
    for residency in args.residency:
        for cost in args.transfer_cost:
            plain = Simulation(residency=residency, transfer_cost=cost, skip=256)
            engine = like_engine(replace(plain, policy="seqmoe", prefetcher="seqmoe"))
            settings: dict[tuple[str, str], tuple[Simulation, Forecasts | None]] = {}
            settings["history", "-"] = replace(plain, policy="history"), None
            for name, made in forecasts.items():
                settings[name, "free"] = engine, made
                settings[name, "guarded"] = replace(engine, guard=True), made
            for (name, how), (setting, said) in settings.items():
                result = simulate(trace, setting, said)
                row: dict[str, Any] = {"residency": residency, "transfer_cost": cost, "predictor": name, "guard": how}
                row |= {key: round(getattr(result, key), 4) for key in SHOWN}
                rows.append(row)
                print(rows[-1], flush=True)
    args.out.write_text(json.dumps({"steps": trace.steps, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
