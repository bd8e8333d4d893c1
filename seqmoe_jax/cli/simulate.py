"""`seqmoe simulate`: what policies and prefetchers would be worth on a trace."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from seqmoe_jax.cli.arguments import above_zero, add_json, natural, number, positive, share
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.simulation.settings import CHUNKS, Prefetcher, SimulatedPolicy, Simulation, beyond_paper, threshold_for

if TYPE_CHECKING:  # at run time only where used: these compile code that no other command needs
    from seqmoe_jax.simulation.simulator import SimulationResult
    from seqmoe_jax.traces.forecasts import Forecasts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="T.npz", help="expert activations, as `seqmoe trace` records them")
    add("--residency", type=share, nargs="+", required=True, metavar="R", help="share of all experts that have a slot")
    add("--policy", nargs="+", choices=get_args(SimulatedPolicy), default=["lru"], metavar="P",
        help=f"what is evicted, of {', '.join(get_args(SimulatedPolicy))} (default: lru)")  # fmt: skip
    add("--prefetcher", nargs="+", choices=get_args(Prefetcher), default=["none"], metavar="P",
        help=f"what is moved ahead, of {', '.join(get_args(Prefetcher))} (default: none)")  # fmt: skip
    link = parser.add_argument_group("link")
    link.add_argument(
        "--transfer-cost", type=above_zero, nargs="+", metavar="RHO", help="transfer / layer compute time"
    )
    link.add_argument("--expert-bytes", type=above_zero, metavar="BYTES", help="instead: size of an expert,")
    link.add_argument("--bandwidth", type=above_zero, metavar="GB/S", help="speed of the link,")
    link.add_argument("--layer-time", type=above_zero, metavar="US", help="and compute time of a layer in microseconds")
    add("--split", help="sequences of this split alone, such as test")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--predictor", metavar="auto|first-order|DIR", help="whose forecasts to use; 'auto': the one "
        "that ships; 'first-order': statistics of the split train")  # fmt: skip
    source.add_argument("--forecasts", metavar="F.npz", help="instead: forecasts made for exactly these sequences")
    add("--model", metavar="ID", help="the model that the trace is of (default: what the trace says)")
    add("--skip", type=natural, default=500, metavar="N", help="first steps that are not counted (default: 500)")
    add("--threshold", type=_threshold, metavar="P", help="least confidence of a prefetch, or 'auto' (default: 0)")
    add("--extra-tasks", type=natural, metavar="N", help="prefetch candidates per layer beyond K (default: 3)")
    add("--beyond", action="store_true", help="all of the options below that gain, set for this link")
    beyond = parser.add_argument_group("beyond the paper")
    beyond.add_argument("--early", action="store_true", help="forecast the next step's lower layers in mid-step")
    beyond.add_argument("--refine", action="store_true", help="forecast this step's upper layers anew in mid-step")
    beyond.add_argument(
        "--chunks", type=positive, metavar="N", help="parts of a transfer between which a miss interrupts"
    )
    beyond.add_argument("--compare", action="store_true", help="a newcomer must be worth more than what it evicts")
    beyond.add_argument("--keep", type=number, metavar="W", help="weight of later use against use in this step")
    beyond.add_argument("--late", action="store_true", help="count what an incomplete transfer saves")
    beyond.add_argument("--horizon", type=natural, metavar="N", help="steps beyond the running one that get tasks")
    beyond.add_argument("--guard", action="store_true", help="follow the predictor as far as it proves right")
    add_json(parser, "machine-readable output: an object, or a list where there are several")


def _threshold(word: str) -> float | str:
    try:
        return word if word == "auto" else number(word)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be a number or 'auto', got {word!r}") from None


def run(args: argparse.Namespace) -> int:
    """Reads, simulates every combination, prints one line, a table or JSON; returns the exit status."""
    from tqdm import tqdm

    from seqmoe_jax.research.simulation import ROLLOUT, forecasts_by
    from seqmoe_jax.simulation.simulator import simulate
    from seqmoe_jax.traces.forecasts import read_forecasts
    from seqmoe_jax.traces.format import read_trace

    whole = read_trace(args.trace)
    trace = whole if args.split is None else whole.select(args.split)
    quiet = args.json or not sys.stderr.isatty()
    forecasts = None
    if args.forecasts is not None:
        forecasts = read_forecasts(args.forecasts, trace)
    elif args.predictor is not None:
        if not quiet:
            print(f"forecasting {trace.steps} steps", file=sys.stderr)
        # A rollout holds as many forecasts as it has steps: made only where something reads it.
        rollout = ROLLOUT if "seqmoe-rollout" in args.policy else args.horizon or int(args.beyond)
        forecasts = forecasts_by(args.predictor, whole, trace, model=args.model, rollout=rollout)
    configs = configurations(args, forecasts)
    if not quiet:
        print(f"simulating {trace.steps} steps of {trace.layers} layers", file=sys.stderr)
    results = []
    with tqdm(unit="step", disable=quiet, delay=1, leave=False) as bar:
        for config in configs:
            bar.reset(trace.steps)
            bar.set_description(config.policy)
            results.append(simulate(trace, config, forecasts, lambda done: bar.update(done - bar.n)))
    if args.json:
        said = [dataclasses.asdict(config) | r.as_dict() for config, r in zip(configs, results, strict=True)]
        print(json.dumps(said if len(said) > 1 else said[0]))
    else:
        print(table(configs, results) if len(configs) > 1 else describe(configs[0], results[0]))
    return 0


def configurations(args: argparse.Namespace, forecasts: Forecasts | None) -> list[Simulation]:
    """Every combination that the arguments describe, the transfer costs innermost."""
    settings = itertools.product(args.policy, args.prefetcher, args.residency, transfer_costs(args))
    return [
        configuration(
            args,
            Simulation(
                residency=residency, policy=policy, prefetcher=prefetcher, transfer_cost=cost, skip=args.skip
            ),
            forecasts,
        )
        for policy, prefetcher, residency, cost in settings
    ]  # fmt: skip


def configuration(args: argparse.Namespace, config: Simulation, forecasts: Forecasts | None) -> Simulation:
    """`config` with the other options; what is given by name wins over `--beyond`."""
    chunks = args.chunks if args.chunks is not None else (CHUNKS if args.beyond else 1)
    if args.beyond:
        config = beyond_paper(config, forecasts, chunks=chunks)
    given: dict[str, Any] = {
        name: True for name in ("early", "refine", "compare", "late", "guard") if getattr(args, name)
    }
    numbers = {name: getattr(args, name) for name in ("extra_tasks", "keep", "horizon", "threshold")}
    given |= {name: value for name, value in numbers.items() if value is not None}
    if args.threshold == "auto":
        given["threshold"] = threshold_for(config.transfer_cost, chunks)
    return dataclasses.replace(config, chunks=chunks, **given)


def transfer_costs(args: argparse.Namespace) -> list[float]:
    """RHO, given or from the size of an expert, the link's bandwidth and a layer's compute time."""
    parts = (args.expert_bytes, args.bandwidth, args.layer_time)
    if args.transfer_cost is not None:
        if any(part is not None for part in parts):
            raise ConfigError("give --transfer-cost, or --expert-bytes, --bandwidth and --layer-time, not both")
        return list(args.transfer_cost)
    if all(part is None for part in parts):
        return [1.0]
    if any(part is None for part in parts):
        raise ConfigError("--expert-bytes, --bandwidth and --layer-time go together")
    return [args.expert_bytes / (args.bandwidth * 1e9) / (args.layer_time * 1e-6)]


def describe(config: Simulation, result: SimulationResult) -> str:
    """The result in one line."""
    return (
        f"{config.policy}, prefetcher {config.prefetcher}, {result.slots} slots, RHO {config.transfer_cost:g}: "
        f"hit rate {result.hit_rate:.3f}, {result.share_of_full_load:.3f} of full load "
        f"(the link alone would allow {result.link_bound:.3f}), {result.transfers_per_step:.1f} transfers per step, "
        f"{result.unused_transfers_per_step:.1f} of them unused"
    )


def table(configs: Sequence[Simulation], results: Sequence[SimulationResult]) -> str:
    """Markdown: a row for each policy and prefetcher, a column for each residency and transfer cost."""
    columns = dict.fromkeys(f"{100 * config.residency:g} %, RHO {config.transfer_cost:g}" for config in configs)
    rows: dict[str, list[str]] = {"share of full load (hit rate; transfers per step, of them unused)": list(columns)}
    rows["---"] = ["---"] * len(columns)
    for config, result in zip(configs, results, strict=True):
        rows.setdefault(f"{config.policy}, prefetcher {config.prefetcher}", []).append(
            f"{result.share_of_full_load:.3f} ({result.hit_rate:.3f}; {result.transfers_per_step:.1f}, "
            f"{result.unused_transfers_per_step:.1f})"
        )
    return "\n".join(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())
