"""`seqmoe bench`: real shapes, random or real weights, routing replayed from a trace."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqmoe_jax.bench.settings import VARIANTS, settings_of
from seqmoe_jax.cli.arguments import (
    add_force,
    add_json,
    add_options,
    batch,
    natural,
    number,
    output,
    positive,
    run_of,
    share,
)
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.inputs import read_json
from seqmoe_jax.options import EngineOptions
from seqmoe_jax.outputs.files import write_text
from seqmoe_jax.outputs.runs import Run, check_replaced

if TYPE_CHECKING:
    from seqmoe_jax.decode.replay import Replay
    from seqmoe_jax.forecast.trained import TrainedPredictor
    from seqmoe_jax.models.model import Model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", default="qwen3-moe-24x32", help="a preset of configs/ (random weights), or a checkpoint")
    add("--replay", metavar="T.npz", help="routing forced on the model; without it the model routes")
    add("--split", help="sequences of this split of the trace alone, such as test")
    add_options(parser, EngineOptions, ["predictor", "kernels", "decode_kernels"])
    add("--residency", type=share, nargs="+", default=[1.0, 0.45, 0.25])
    add("--policies", nargs="+", default=["lru", "evict", "dma"], choices=list(VARIANTS), metavar="NAME",
        help=f"what to compare: {', '.join(VARIANTS)}")  # fmt: skip
    add("--batch", type=batch, nargs="+", default=[1])
    add("--steps", type=positive, default=512, help="decode steps of each run (default: 512)")
    add("--repeats", type=natural, default=3, help="runs after the one that warms up (default: 3)")
    add("--temperature", type=number, default=0.0, help="0 (default) is greedy; without --replay, random weights then "
        "repeat one token, and so one set of experts")  # fmt: skip
    add("--shares", type=natural, nargs="?", const=2**31, default=0, metavar="N", help="profile one more run of every "
        "setting (N: the last N steps of it): time by class and kernel")  # fmt: skip
    add("--out", type=output, metavar="FILE.json", help="written after every row")
    add("--plot", type=output, metavar="FILE", help="speed against residency, and time shares: .png, .svg or .pdf")
    add_force(parser)
    add_json(parser, "the result as JSON on standard output")


def run(args: argparse.Namespace) -> int:
    """Measures every setting; exit status 1 says that one of them failed."""
    from seqmoe_jax import plots
    from seqmoe_jax.bench.measure import measure
    from seqmoe_jax.bench.shares import describe

    made_by = run_of(args)
    if args.out:
        check_replaced(args.out, "benchmark", read_run, made_by, force=args.force)
    if args.plot:
        plots.check_output(args.plot, made_by, force=args.force)
    model, load_s = _load(args)
    predictor, replay = _routing(args, model)
    settings = settings_of(args.policies, args.residency, args.batch)
    without = {setting.name for setting in settings if setting.predicted and predictor is None}
    if without:
        raise ConfigError(f"{', '.join(sorted(without))} need a predictor; give --predictor DIR")
    result = _about(args, model, predictor, replay) | {"load_s": round(load_s, 1), "run": made_by, "rows": []}

    def say(text: str) -> None:
        print(text, file=sys.stderr if args.json else sys.stdout, flush=True)

    size = result["host_pool_bytes"] / 1e9
    say(f"{args.model} on {result['device']}: {size:.1f} GB of experts in host memory, ready in {load_s:.1f} s")
    say(HEADER)
    for setting in settings:
        options = setting.options
        try:
            row = measure(
                model, setting, predictor=predictor, replay=replay, steps=args.steps, repeats=args.repeats,
                temperature=args.temperature, profiled=args.shares, kernels=args.kernels,
                decode_kernels=args.decode_kernels,
            )  # fmt: skip
        except Exception as error:  # one setting that fails leaves the others
            row = {"name": setting.name, "residency": options.residency, "batch": options.max_batch,
                   "error": repr(error)}  # fmt: skip
        result["rows"].append(row)
        compare(result["rows"])
        if "error" in row:
            say(f"{setting.name:14} {options.residency:5.2f}  failed: {row['error']}"[:400])
        else:
            say(line(row) if row["shares"] is None else f"{line(row)}\n{describe(row)}")
        if args.out:
            write_text(args.out, json.dumps(result, indent=1))
    if args.plot and any("error" not in row for row in result["rows"]):
        plots.write(args.plot, plots.bench(result), made_by)
    if args.json:
        print(json.dumps(result))
    return 1 if any("error" in row for row in result["rows"]) else 0


def read_run(path: Path) -> Run | None:
    """The run of what `--out` wrote: empty where it does not say, None where the file is something else."""
    try:
        said = read_json(path)
    except ConfigError:
        return None
    run = said.get("run")
    return (run if isinstance(run, dict) else {}) if isinstance(said.get("rows"), list) else None


def _load(args: argparse.Namespace) -> tuple[Model, float]:
    """The model, and how many seconds it took."""
    import jax

    from seqmoe_jax.compilation import enable_compilation_cache
    from seqmoe_jax.loading import load_model, random_model
    from seqmoe_jax.memory.fit import check_host
    from seqmoe_jax.presets import preset_names, preset_path

    enable_compilation_cache()
    begun = time.perf_counter()
    if args.model in preset_names():
        model = random_model(preset_path(args.model), name=args.model, check=check_host)
    else:
        model, _ = load_model(args.model, check=check_host)
    jax.block_until_ready(model.weights)
    return model, time.perf_counter() - begun


def _routing(args: argparse.Namespace, model: Model) -> tuple[TrainedPredictor | None, Replay | None]:
    """What forecasts the routing, and the recorded routing that is forced on the model."""
    from seqmoe_jax.bench.replayed import replay_of
    from seqmoe_jax.loading import find_and_load_predictor, load_predictor
    from seqmoe_jax.traces.format import read_trace

    trace = replay = None
    if args.replay:
        trace = read_trace(args.replay)
        if args.split:
            trace = trace.select(args.split)
        replay = replay_of(trace, model.spec, args.steps * (args.repeats + 1 + bool(args.shares)))
    if args.predictor not in ("auto", "none"):  # of whatever model the routing is; its sizes are checked where it runs
        return load_predictor(Path(args.predictor), model.weights.embed), replay
    trained_on = None if trace is None else trace.model
    return find_and_load_predictor(args.predictor, model, trained_on=trained_on), replay


def _about(
    args: argparse.Namespace, model: Model, predictor: TrainedPredictor | None, replay: Replay | None
) -> dict[str, Any]:
    """What was measured, and on what."""
    import jax

    return {
        "model": args.model,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "replay": None if replay is None else {"steps": int(replay.ids.shape[0]), "split": args.split},
        "predictor": None if predictor is None else predictor.name,
        "expert_bytes": model.spec.expert_layout.block_bytes,
        "host_pool_bytes": sum(pool.nbytes for pool in model.pools),
        "steps": args.steps,
        "repeats": args.repeats,
        "temperature": args.temperature,
    }


def compare(rows: list[dict[str, Any]]) -> None:
    """Gives rows their share of the speed of full load, and whether their first tokens are its, where it is there."""
    measured = [row for row in rows if "error" not in row]
    for full in [row for row in measured if row["name"] == "full"]:
        for row in [row for row in measured if row["batch"] == full["batch"]]:
            row["share_of_full_load"] = row["tokens_per_second"] / full["tokens_per_second"]
            row["tokens_of_full_load"] = row["first_tokens"] == full["first_tokens"]


HEADER = (
    "name            resid.  batch    tok/s  (least-most)        share  hit rate  loads  awaited  ahead  MB/step"
    "    RHO  planned, used, peak GB     s"
)


def line(row: dict[str, Any]) -> str:
    low, high = row["spread"]
    share = f"{row['share_of_full_load']:.3f}" if "share_of_full_load" in row else "-"
    cost = f"{row['transfer_cost']:.2f}" if row["transfer_cost"] else "-"
    memory = [row["planned_bytes"], row["used_bytes"], row["peak_bytes"]]
    sizes = " ".join(f"{'-' if size is None else f'{size / 1e9:.1f}':>7}" for size in memory)
    return (
        f"{row['name']:14} {row['residency']:7.3f} {row['batch']:6} {row['tokens_per_second']:8.1f}  "
        f"({low:.1f}-{high:.1f}){'':4} {share:>6} {row['hit_rate']:9.4f} {row['loaded_per_step']:6.2f} "
        f"{row['awaited_per_step']:8.2f} {row['prefetched_per_step']:6.2f} "
        f"{row['bytes_per_step'] / 1e6:8.1f} {cost:>6} {sizes} {row['seconds']:5.0f}"
        f"{'  FAULT ' + row['fault'] if row['fault'] else ''}"
        f"{'' if row.get('tokens_of_full_load', True) else '  OTHER TOKENS THAN FULL LOAD'}"
    )
