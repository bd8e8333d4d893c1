"""The paper's two predictors by groups of layers and its eviction by rollout, beside one predictor and retention.

    python -m scripts.paper.layer_groups TRACE.npz --out layer_groups.json

One predictor reads and forecasts the lower half of the layers as soon as they have run, at L/2, the other the upper
half at L (paper 5.2, 9.1); the third has all layers, at L. All are of the paper's input, activations alone, and
trained alike.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seqmoe_jax.cli.stretch_trace import fewer
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.data import divide, prepare
from seqmoe_jax.forecast.evaluation.export import forecasts_of
from seqmoe_jax.forecast.predictor import weights_of
from seqmoe_jax.forecast.training.config import TrainConfig
from seqmoe_jax.forecast.training.fit import fit
from seqmoe_jax.simulation.settings import Simulation
from seqmoe_jax.simulation.simulator import simulate
from seqmoe_jax.traces.forecasts import Forecasts
from seqmoe_jax.traces.format import Trace, read_trace

ROLLOUT = 7  # steps after the coming one: 8 in all


def layers_of(trace: Trace, layers: slice) -> Trace:
    """The trace of some of its layers."""
    index = trace.layer_index[layers]
    return replace(trace, ids=trace.ids[:, layers], probs_u8=trace.probs_u8[:, layers], layer_index=index)


def trained_forecasts(train: Trace, held: Trace, args: argparse.Namespace) -> Forecasts:
    """Of a predictor of the layers that both traces have."""
    config = PredictorConfig(
        model="", **train.sizes, inputs="activations", d_model=args.width, blocks=args.blocks, echo=0,
        refine_width=args.width,
    )  # fmt: skip
    training = TrainConfig(updates=args.updates, batch=args.batch, window=256, bfloat16=jax.default_backend() != "cpu")
    fitted, validation = (prepare(part, config, None) for part in divide(train))
    result = fit(config, training, fitted, validation, seed=args.seed, log=lambda line: print(line, flush=True))
    return forecasts_of(config, weights_of(config, result.params), held, rollout=ROLLOUT, name=f"{train.layers} layers")


def joined(lower: Forecasts, upper: Forecasts) -> Forecasts:
    """What both say together. What the lower one says of a step is there in the middle of the step before."""

    def both(name: str) -> np.ndarray:
        return np.concatenate([getattr(lower, name), getattr(upper, name)], axis=-2)

    following, trigger = both("next"), lower.next.shape[1]
    return Forecasts(
        next=following, early=following, trigger=trigger, retention=both("retention"), rollout=both("rollout"),
        name="by groups",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train-steps", type=int, default=150_000, help="of the split train (default: 150,000, all)")
    parser.add_argument("--sequences", type=int, default=1000, help="of the split test, the first (default: all)")
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--residency", type=float, nargs="+", default=[0.15, 0.25, 0.45])
    parser.add_argument("--transfer-cost", type=float, nargs="+", default=[0.72, 3.0])
    args = parser.parse_args()
    trace = fewer(read_trace(args.trace), args.train_steps)
    train, held = trace.select("train"), trace.select("test")
    held = held.take(np.arange(min(args.sequences, held.sequences)))
    half = trace.layers // 2
    said = [
        trained_forecasts(layers_of(train, layers), layers_of(held, layers), args)
        for layers in (slice(0, half), slice(half, None), slice(None))
    ]
    groups, whole = joined(*said[:2]), said[2]
    rows: list[dict[str, Any]] = []
    for residency in args.residency:
        for cost in args.transfer_cost:
            retention = Simulation(residency=residency, transfer_cost=cost, policy="seqmoe", prefetcher="seqmoe")
            rollout = replace(retention, policy="seqmoe-rollout")
            settings: dict[str, tuple[Simulation, Forecasts]] = {
                "two predictors, rollout (the paper)": (replace(rollout, early=True), groups),
                "two predictors, retention": (replace(retention, early=True), groups),
                "one predictor, rollout": (rollout, whole),
                "one predictor, retention": (retention, whole),
                "one predictor, retention, refined at L/2 (ours)": (replace(retention, refine=True), whole),
            }
            for name, (config, forecasts) in settings.items():
                result = simulate(held, config, forecasts)
                row: dict[str, Any] = {"residency": residency, "transfer_cost": cost, "setting": name}
                row |= {key: round(getattr(result, key), 4) for key in ("share_of_full_load", "hit_rate")}
                rows.append(row)
                print(row, flush=True)
    args.out.write_text(json.dumps({"train_steps": train.steps, "steps": held.steps, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
