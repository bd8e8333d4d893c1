"""`seqmoe simulate`: what a policy and a prefetcher would be worth, from a trace alone."""

from __future__ import annotations

import argparse
import json
import sys

from seqmoe_jax.errors import ConfigError

_POLICIES = ("lru", "lfu", "prefill-hot", "belady", "belady-8", "forecast", "forecast-direct")
_PREFETCHERS = ("none", "moe-infinity", "promoe", "seqmoe")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="T.npz", help="expert activations, as `seqmoe trace` records them")
    add("--residency", type=float, required=True, metavar="R", help="share of all experts that have a slot")
    add("--policy", choices=_POLICIES, default="lru", help="what is evicted (default: lru)")
    add("--prefetcher", choices=_PREFETCHERS, default="none", help="what is moved ahead (default: none)")
    link = parser.add_argument_group("link")
    link.add_argument("--transfer-cost", type=float, metavar="RHO", help="transfer time / layer compute time")
    link.add_argument("--expert-bytes", type=float, metavar="BYTES", help="instead: size of an expert,")
    link.add_argument("--bandwidth", type=float, metavar="GB/S", help="speed of the link,")
    link.add_argument("--layer-time", type=float, metavar="US", help="and compute time of a layer in microseconds")
    add("--split", help="sequences of this split alone, such as test")
    add("--forecasts", metavar="F.npz", help="forecasts for exactly these sequences")
    add("--skip", type=int, default=500, metavar="N", help="first steps that are not counted (default: 500)")
    add("--threshold", help="least confidence of a prefetch (default: 0); 'auto' with --beyond")
    beyond = parser.add_argument_group("beyond the paper (all of it with --beyond)")
    beyond.add_argument("--beyond", action="store_true", help="everything below, set for this link and residency")
    beyond.add_argument("--refine", action="store_true", help="forecast the upper layers anew in mid-step")
    beyond.add_argument("--chunks", type=int, metavar="N", help="parts of a transfer between which a miss interrupts")
    beyond.add_argument("--compare", action="store_true", help="a newcomer must be worth more than what it evicts")
    beyond.add_argument("--late", action="store_true", help="start transfers that will be incomplete when needed")
    beyond.add_argument("--horizon", type=int, metavar="N", help="steps beyond the running one that get tasks")
    add("--json", action="store_true", help="machine-readable output")


def transfer_cost(args: argparse.Namespace) -> float:
    """RHO, given or from the size of an expert, the link's bandwidth and a layer's compute time."""
    parts = (args.expert_bytes, args.bandwidth, args.layer_time)
    if args.transfer_cost is not None:
        if any(part is not None for part in parts):
            raise ConfigError("give --transfer-cost, or --expert-bytes, --bandwidth and --layer-time, not both")
        return args.transfer_cost
    if all(part is None for part in parts):
        return 1.0
    if any(part is None or part <= 0 for part in parts):
        raise ConfigError("--expert-bytes, --bandwidth and --layer-time go together, each above 0")
    return args.expert_bytes / (args.bandwidth * 1e9) / (args.layer_time * 1e-6)


def run(args: argparse.Namespace) -> int:
    # Here and not above: these compile code that other commands have no use for.
    from tqdm import tqdm

    from seqmoe_jax.traces.forecasts import read_forecasts
    from seqmoe_jax.traces.format import read_trace
    from seqmoe_jax.traces.simulator import simulate

    config = configuration(args)
    trace = read_trace(args.trace)
    if args.split is not None:
        trace = trace.select(args.split)
    forecasts = read_forecasts(args.forecasts, trace) if args.forecasts is not None else None
    if config is None:
        config = _beyond(args, forecasts)
    quiet = args.json or not sys.stderr.isatty()
    if not quiet:
        print(f"simulating {trace.steps} steps of {trace.layers} layers", file=sys.stderr)
    with tqdm(total=trace.steps, unit="step", disable=quiet, delay=1, leave=False) as bar:
        result = simulate(trace, config, forecasts, progress=lambda done: bar.update(done - bar.n))
    if args.json:
        print(json.dumps({"policy": config.policy, "prefetcher": config.prefetcher} | result.as_dict()))
        return 0
    print(
        f"{config.policy}, prefetcher {config.prefetcher}, {result.slots} slots, RHO {config.transfer_cost:g}: "
        f"hit rate {result.hit_rate:.3f}, {result.share_of_full_load:.3f} of full load "
        f"(the link alone would allow {result.link_bound:.3f}), {result.transfers_per_step:.1f} transfers per step, "
        f"{result.unused_transfers_per_step:.1f} of them unused"
    )
    return 0
