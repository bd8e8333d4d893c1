"""`seqmoe trace` records a trace; `seqmoe simulate` says what a policy and a prefetcher would be worth on one."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqmoe_jax.cli.arguments import (
    add_load_arguments,
    add_sampling_arguments,
    generate_options,
    load_engine,
    progress_of,
)
from seqmoe_jax.errors import ConfigError

if TYPE_CHECKING:  # at run time only where used: these compile code that no other command needs
    from seqmoe_jax.simulation.simulator import Result, Simulation
    from seqmoe_jax.traces.forecasts import Forecasts
    from seqmoe_jax.traces.format import Trace

_POLICIES = ("lru", "lfu", "prefill-hot", "belady", "belady-8", "forecast", "forecast-direct")
ROLLOUT = 7  # steps beyond the coming one that policy `forecast` scores by: 8 in all (paper, 9.1)
_PREFETCHERS = ("none", "moe-infinity", "promoe", "seqmoe")


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser)
    add_sampling_arguments(parser)
    add = parser.add_argument
    add("--prompts", required=True, metavar="FILE", help="one per line; or .jsonl of objects with 'prompt' and, "
        "if wanted, 'split' and 'temperature'")  # fmt: skip
    add("--out", required=True, metavar="T.npz")
    add("--chat", action="store_true", help="prompts are a user's messages, to be answered by the chat template")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="per prompt, at most (default: 256)")
    add("--batch", type=int, default=8, metavar="B", help="sequences decoded together, 1 to 8 (default: 8)")
    add("--name", metavar="ID", help="what the trace calls the model (default: MODEL, of a path its last part)")
    add("--json", action="store_true", help="machine-readable output")


def record(args: argparse.Namespace) -> int:
    """Reads the prompts, loads the model, records; prints one line or one JSON object."""
    from tqdm import tqdm

    from seqmoe_jax.traces.record import Recording, read_prompts
    from seqmoe_jax.traces.record import record as record_prompts

    options, prompts = generate_options(args), read_prompts(args.prompts)
    engine = load_engine(args, max_batch=args.batch, progress=progress_of(args))
    recording = Recording(
        max_new_tokens=args.max_new_tokens, sampling=options.sampling_over(engine.defaults), chat=args.chat
    )
    begun = time.perf_counter()
    with tqdm(total=len(prompts), unit="prompt", disable=args.json or not sys.stderr.isatty(), leave=False) as bar:

        def progress(done: int, steps: int) -> None:
            bar.update(done - bar.n)
            bar.set_postfix_str(f"{steps} steps")

        trace = record_prompts(engine, prompts, recording, args.out, model=model_name(args), progress=progress)
    decoded = int(trace.decoded().sum())
    said = {
        "trace": str(args.out),
        "model": trace.model,
        "sequences": trace.sequences,
        "left_out": len(prompts) - trace.sequences,
        "prompt_steps": trace.steps - decoded,
        "decode_steps": decoded,
        **trace.sizes,
        "seconds": round(time.perf_counter() - begun, 1),
    }
    if args.json:
        print(json.dumps(said))
    else:
        print(
            f"{args.out}: {trace.sequences} sequences of {trace.model}, {decoded} decode steps after "
            f"{trace.steps - decoded} of prompts, in {said['seconds']} s"
        )
    return 0


def model_name(args: argparse.Namespace) -> str:
    """What the trace calls its model: no directory of this machine."""
    return args.name or (Path(args.model).resolve().name if Path(args.model).exists() else args.model)


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
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--predictor", metavar="auto|DIR", help="whose forecasts to use; 'auto': the one that ships")
    source.add_argument("--forecasts", metavar="F.npz", help="instead: forecasts made for exactly these sequences")
    add("--model", metavar="ID", help="the model that the trace is of (default: what the trace says)")
    add("--skip", type=int, default=500, metavar="N", help="first steps that are not counted (default: 500)")
    add("--threshold", type=_threshold, metavar="P", help="least confidence of a prefetch, or 'auto' (default: 0)")
    add("--beyond", action="store_true", help="all of the options below that gain, set for this link")
    beyond = parser.add_argument_group("beyond the paper")
    beyond.add_argument("--early", action="store_true", help="forecast the next step's lower layers in mid-step")
    beyond.add_argument("--refine", action="store_true", help="forecast this step's upper layers anew in mid-step")
    beyond.add_argument("--chunks", type=int, metavar="N", help="parts of a transfer between which a miss interrupts")
    beyond.add_argument("--compare", action="store_true", help="a newcomer must be worth more than what it evicts")
    beyond.add_argument("--late", action="store_true", help="count what an incomplete transfer saves")
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


def _threshold(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or 'auto', got {text!r}") from None


def configuration(args: argparse.Namespace, forecasts: Forecasts | None) -> Simulation:
    """The simulation that the arguments describe; what is given by name wins over `--beyond`."""
    from seqmoe_jax.simulation.settings import CHUNKS, beyond_paper, threshold_for
    from seqmoe_jax.simulation.simulator import Simulation

    config = Simulation(
        residency=args.residency,
        policy=args.policy,
        prefetcher=args.prefetcher,
        transfer_cost=transfer_cost(args),
        skip=args.skip,
    )
    chunks = args.chunks if args.chunks is not None else (CHUNKS if args.beyond else 1)
    if args.beyond:
        config = beyond_paper(config, forecasts, chunks=chunks)
    given: dict[str, Any] = {name: True for name in ("early", "refine", "compare", "late") if getattr(args, name)}
    given["chunks"] = chunks
    if args.horizon is not None:
        given["horizon"] = args.horizon
    if args.threshold == "auto":
        given["threshold"] = threshold_for(config.transfer_cost, chunks)
    elif args.threshold is not None:
        given["threshold"] = args.threshold
    return dataclasses.replace(config, **given)


def run(args: argparse.Namespace) -> int:
    """Reads, simulates, prints one line or one JSON object; returns the exit status."""
    from tqdm import tqdm

    from seqmoe_jax.simulation.simulator import simulate
    from seqmoe_jax.traces.forecasts import read_forecasts
    from seqmoe_jax.traces.format import read_trace

    trace = read_trace(args.trace)
    if args.split is not None:
        trace = trace.select(args.split)
    quiet = args.json or not sys.stderr.isatty()
    forecasts = read_forecasts(args.forecasts, trace) if args.forecasts is not None else None
    if args.predictor is not None:
        if not quiet:
            print(f"forecasting {trace.steps} steps", file=sys.stderr)
        forecasts = _forecast(args, trace)
    config = configuration(args, forecasts)
    if not quiet:
        print(f"simulating {trace.steps} steps of {trace.layers} layers", file=sys.stderr)
    with tqdm(total=trace.steps, unit="step", disable=quiet, delay=1, leave=False) as bar:
        result = simulate(trace, config, forecasts, progress=lambda done: _show(bar, done))
    if args.json:
        print(json.dumps(dataclasses.asdict(config) | result.as_dict()))
    else:
        print(describe(config, result))
    return 0


def _forecast(args: argparse.Namespace, trace: Trace) -> Forecasts:
    """What a predictor says of this trace, as far as the simulation reads it."""
    from seqmoe_jax.forecast import store
    from seqmoe_jax.forecast.evaluation.export import forecasts_of

    directory = store.require_predictor(args.predictor, args.model or trace.model, **trace.sizes)
    # A rollout holds as many forecasts as it has steps: made only where something reads it.
    rollout = ROLLOUT if args.policy == "forecast" else args.horizon or int(args.beyond)
    return forecasts_of(*store.load(directory), trace, rollout=rollout, name=str(args.predictor))


def _show(bar: Any, done: int) -> None:
    bar.update(done - bar.n)


def describe(config: Simulation, result: Result) -> str:
    """The result in one line."""
    return (
        f"{config.policy}, prefetcher {config.prefetcher}, {result.slots} slots, RHO {config.transfer_cost:g}: "
        f"hit rate {result.hit_rate:.3f}, {result.share_of_full_load:.3f} of full load "
        f"(the link alone would allow {result.link_bound:.3f}), {result.transfers_per_step:.1f} transfers per step, "
        f"{result.unused_transfers_per_step:.1f} of them unused"
    )
