"""Every policy, prefetcher and improvement on one trace with one file of forecasts, as Markdown tables.

    python scripts/simulate_table.py T.npz --split test --forecasts F.npz

Without --forecasts, first order forecasts are fitted on split `train`; with --linear, ridge regression (10 minutes of
CPU time). --save keeps what was made, for `seqmoe simulate --forecasts`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from seqmoe_jax.simulation.forecasters import FirstOrder
from seqmoe_jax.simulation.linear import LinearForecaster
from seqmoe_jax.simulation.settings import CHUNKS, EXTRA_TASKS, beyond_paper, threshold_for
from seqmoe_jax.simulation.simulator import Prefetcher, Result, SimulatedPolicy, Simulation, simulate
from seqmoe_jax.traces.forecasts import Forecasts, read_forecasts, write_forecasts
from seqmoe_jax.traces.format import Trace, read_trace

POLICIES: tuple[SimulatedPolicy, ...] = (
    "lru",
    "lfu",
    "prefill-hot",
    "forecast",
    "forecast-direct",
    "belady-8",
    "belady",
)
PREFETCHERS: tuple[Prefetcher, ...] = ("moe-infinity", "promoe", "seqmoe")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", metavar="T.npz")
    parser.add_argument("--split", default="test")
    parser.add_argument("--forecasts", metavar="F.npz")
    parser.add_argument("--linear", action="store_true")
    parser.add_argument("--activations-only", action="store_true", help="with --linear: without the sampled token")
    parser.add_argument("--save", metavar="F.npz")
    parser.add_argument("--residency", type=float, nargs="+", default=[0.45, 0.25])
    parser.add_argument("--transfer-cost", type=float, nargs="+", default=[0.72, 3.0])
    args = parser.parse_args()
    whole = read_trace(args.trace)
    trace = whole.select(args.split)
    forecasts = make_forecasts(args, whole, trace)
    if args.save:
        write_forecasts(args.save, forecasts)
    points = [(residency, cost) for residency in args.residency for cost in args.transfer_cost]
    print(
        f"Forecasts: {forecasts.name}. Split {args.split}: {trace.steps} steps. A cell: share of full load (hit rate;"
    )
    print("transfers per step, of them unused).")
    for title, rows in (
        ("By demand only", demand_rows(forecasts)),
        ("Prefetchers", prefetcher_rows(forecasts)),
        ("Beyond the paper, policy forecast-direct, prefetcher seqmoe", beyond_rows(forecasts)),
    ):
        print(f"\n## {title}\n")
        print("| |" + "".join(f" {residency:.0%}, RHO {cost:g} |" for residency, cost in points))
        print("|---" * (1 + len(points)) + "|")
        for name, base in rows:
            print(f"| {name} |", end="", flush=True)
            for residency, cost in points:
                config = base(Simulation(residency=residency, transfer_cost=cost))
                print(f" {cell(simulate(trace, config, forecasts))} |", end="", flush=True)
            print()


def make_forecasts(args: argparse.Namespace, whole: Trace, trace: Trace) -> Forecasts:
    if args.forecasts:
        return read_forecasts(args.forecasts, trace)
    train = whole.select("train")
    if args.linear:
        fitted = LinearForecaster.fit(train, use_token=not args.activations_only)
        return fitted.forecasts(trace, name="linear" if args.activations_only else "linear+token")
    return FirstOrder.fit(train).forecasts(trace, rollout=8)


def cell(result: Result) -> str:
    return (
        f"{result.share_of_full_load:.3f} ({result.hit_rate:.3f}; {result.transfers_per_step:.1f}, "
        f"{result.unused_transfers_per_step:.1f})"
    )


def demand_rows(forecasts: Forecasts) -> Iterator[tuple]:
    for policy in known(forecasts, POLICIES):
        yield policy, lambda config, policy=policy: replace(config, policy=policy)


def prefetcher_rows(forecasts: Forecasts) -> Iterator[tuple]:
    for policy in known(forecasts, POLICIES):
        for prefetcher in PREFETCHERS:
            yield (
                f"{policy}, {prefetcher}",
                lambda config, policy=policy, prefetcher=prefetcher: replace(
                    config, policy=policy, prefetcher=prefetcher
                ),
            )


def beyond_rows(forecasts: Forecasts) -> Iterator[tuple]:
    """The paper's method, each improvement alone, all of them, and all but each."""

    def paper(config: Simulation) -> Simulation:
        return replace(config, policy="forecast-direct", prefetcher="seqmoe")

    alone = {
        "threshold by RHO": lambda c: replace(c, threshold=threshold_for(c.transfer_cost, c.chunks)),
        f"top K+{EXTRA_TASKS} tasks": lambda c: replace(c, extra_tasks=EXTRA_TASKS),
        "chunks": lambda c: replace(c, chunks=CHUNKS),
        "newcomer against victim": lambda c: replace(c, compare=True),
        "retention weighs half": lambda c: replace(c, keep=0.5),
        "incomplete transfers count": lambda c: replace(c, late=True),
    }
    if forecasts.early is not None:
        alone["early forecast at the trigger (paper)"] = lambda c: replace(c, early=True)
    if forecasts.refined is not None:
        alone["refined forecast at the trigger"] = lambda c: replace(c, refine=True)
    if forecasts.rollout is not None:
        alone["deadlines one step further"] = lambda c: replace(c, horizon=1)
    yield "paper", paper
    for name, change in alone.items():
        yield f"+ {name}", lambda config, change=change: change(paper(config))

    def together(config: Simulation) -> Simulation:
        return beyond_paper(paper(config), forecasts)

    yield "all that gain, set for RHO (`--beyond`)", together
    without = {
        "chunks": lambda c: beyond_paper(c, forecasts, chunks=1),
        "newcomer against victim": lambda c: replace(c, compare=False),
        "early forecast": lambda c: replace(c, early=False),
        "refined forecast": lambda c: replace(c, refine=False),
        "incomplete transfers": lambda c: replace(c, late=False),
        "threshold": lambda c: replace(c, threshold=0.0),
    }
    for name, change in without.items():
        yield f"all but {name}", lambda config, change=change: change(together(config))
    if forecasts.rollout is not None:
        yield "all, deadlines one step further", lambda config: replace(together(config), horizon=1)


def known(forecasts: Forecasts, policies: tuple[SimulatedPolicy, ...]) -> Iterator[SimulatedPolicy]:
    needs = {"forecast": forecasts.rollout, "forecast-direct": forecasts.retention}
    return (policy for policy in policies if policy not in needs or needs[policy] is not None)


if __name__ == "__main__":
    main()
