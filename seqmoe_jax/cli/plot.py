"""`seqmoe plot`: what other commands wrote, or a trace, as an image file (`plots`). Needs matplotlib."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqmoe_jax import plots
from seqmoe_jax.cli.arguments import add_force, add_json, natural, output, run_of, share
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.fields import Fields
from seqmoe_jax.inputs import read_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from seqmoe_jax.traces.format import Trace

POLICIES = ("lru", "lfu", "prefill-hot", "belady", "belady-8")  # those that need no forecasts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")

    def kind(name: str, what: str) -> argparse.ArgumentParser:
        each = kinds.add_parser(name, help=what, description=what)
        each.add_argument("--out", type=output, required=True, metavar="FILE", help="ends in .png, .svg or .pdf")
        add_force(each)
        add_json(each, "print what is drawn as JSON")
        return each

    recall = kind("recall", "recall per layer, from what `seqmoe evaluate --json` or `train-predictor` wrote")
    recall.add_argument("evaluation", type=Path, metavar="E.json")
    recall.add_argument("--split", help="where it holds several (default: the first)")
    rate = kind("hit-rate", "hit rate of caching policies against residency, simulated on a trace")
    rate.add_argument("trace", metavar="T.npz")
    rate.add_argument("--split", help="sequences of this split alone")
    rate.add_argument("--policies", nargs="+", choices=POLICIES, default=list(plots.SHOWN), metavar="P",
                      help=f"of {', '.join(POLICIES)} (default: {' '.join(plots.SHOWN)})")  # fmt: skip
    rate.add_argument("--residencies", nargs="+", type=share, default=list(plots.RESIDENCIES), metavar="R")
    rate.add_argument("--predictor", metavar="auto|first-order|DIR", help="adds policy seqmoe by its forecasts")
    rate.add_argument("--model", metavar="ID", help="the model of the trace (default: what the trace says)")
    rate.add_argument("--skip", type=natural, default=500, metavar="N", help="first steps not counted (default: 500)")
    heat = kind("heatmap", "how often each expert is activated, and one sequence step by step")
    heat.add_argument("trace", metavar="T.npz")
    heat.add_argument("--split", help="sequences of this split alone")
    heat.add_argument("--sequence", type=natural, default=0, metavar="I", help="which one to show (default: the first)")
    bench = kind("bench", "speed against residency and, if profiled, time shares, from what `seqmoe bench --out` wrote")
    bench.add_argument("result", type=Path, metavar="B.json")


def run(args: argparse.Namespace) -> int:
    made_by = run_of(args)
    plots.check_output(args.out, made_by, force=args.force)
    kinds = {"recall": _recall, "hit-rate": _hit_rate, "heatmap": _heatmap, "bench": _bench}
    figure, drawn = kinds[args.kind](args)
    plots.write(args.out, figure, made_by)
    print(json.dumps({"file": str(args.out)} | drawn) if args.json else str(args.out))
    return 0


def read_evaluation(path: Path, split: str | None = None) -> tuple[dict[str, Any], str | None]:
    """Rows of a recall table by predictor, and the split they are of. Raises `ConfigError`."""
    said = Fields(read_json(path), str(path))
    if "splits" in said.values:
        splits = said.group("splits")
        split = split or next(iter(splits.values), "")
        if split not in splits.values:
            raise ConfigError(f"{path} has no split {split!r}: expected one of {', '.join(splits.values)}")
        said = splits.group(split)
    rows = said.group("predictors")
    if not rows.values:
        raise ConfigError(f"{path}: expected the JSON of `seqmoe evaluate --json`, got none of 'predictors'")
    return {name: _recall_row(rows.group(name)) for name in rows.values}, split


def _recall_row(row: Fields) -> Mapping[str, Any]:
    """A row of the table, whose fields are what the figure reads."""
    at, refined = row.group("recall_at"), row.group("refined")
    if len([at.number(name, least=0, most=1) for name in at.values]) < 4 or not row.numbers("per_layer", within=(0, 1)):
        raise ConfigError(f"{row.where}: expected recall at 4 tops or more, and of every layer")
    row.integer("steps", least=0, most=2**53)
    if refined.values:
        refined.count("trigger"), refined.numbers("per_layer", within=(0, 1))
    return row.values


def _recall(args: argparse.Namespace) -> tuple[Figure, dict[str, Any]]:
    rows, split = read_evaluation(args.evaluation, args.split)
    return plots.recall(rows, split), {"predictors": {name: row["per_layer"] for name, row in rows.items()}}


def _hit_rate(args: argparse.Namespace) -> tuple[Figure, dict[str, Any]]:
    from tqdm import tqdm

    from seqmoe_jax.research.simulation import hit_rates
    from seqmoe_jax.traces.format import read_trace

    trace, residencies = read_trace(args.trace), sorted(args.residencies)
    with tqdm(disable=args.json or not sys.stderr.isatty(), leave=False) as bar:

        def progress(done: int, points: int) -> None:
            bar.total = points
            bar.update(done - bar.n)

        curves = hit_rates(
            trace, residencies=residencies, policies=args.policies, predictor=args.predictor, split=args.split,
            model=args.model, skip=args.skip, progress=progress,
        )  # fmt: skip
    return plots.hit_rate_curves(residencies, curves, plots.about(trace)), {
        "residencies": residencies, "hit_rates": curves,
    }  # fmt: skip


def _heatmap(args: argparse.Namespace) -> tuple[Figure, dict[str, Any]]:
    _, trace = _traces(args)
    if not 0 <= args.sequence < trace.sequences:
        raise ConfigError(f"--sequence must be from 0 to {trace.sequences - 1}, got {args.sequence}")
    drawn = {"sequence": args.sequence, "steps": int(trace.lens[args.sequence])}
    return plots.heatmap(trace, args.sequence), drawn


def _bench(args: argparse.Namespace) -> tuple[Figure, dict[str, Any]]:
    said = Fields(read_json(args.result), str(args.result))
    rows = said.values.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{args.result}: expected the JSON of `seqmoe bench --out`, got no rows in it")
    each = [said.of(row, f"{args.result}: row {index}") for index, row in enumerate(rows) if "error" not in row]
    if not each:
        raise ConfigError(f"{args.result}: no row of it was measured")
    about = {"model": said.text("model"), "device": said.text("device"), "repeats": said.count("repeats")}
    measured = [_bench_row(row) for row in each]
    if len({tuple(row["shares"]["share"]) for row in measured if row["shares"]}) > 1:
        raise ConfigError(f"{args.result}: expected the same classes of time in every row")
    drawn = [{name: row[name] for name in ("name", "residency", "batch", "tokens_per_second")} for row in measured]
    return plots.bench(about | {"rows": measured}), {"rows": drawn}


def _bench_row(row: Fields) -> dict[str, Any]:
    """What the figure reads of a row."""
    shares, low = row.group("shares"), row.number("tokens_per_second", least=0)
    spread = row.numbers("spread", within=(0, 1e30))
    if len(spread) != 2 or not spread[0] <= low <= spread[1]:
        raise ConfigError(f"{row.where}: field 'spread' must be the least and the most tokens per second")
    classes, times = shares.group("share").values, shares.group("us_per_step")
    taken = {name: times.number(name, least=0) for name in classes}
    return {
        "name": row.text("name"),
        "residency": row.number("residency", least=0, most=1),
        "batch": row.count("batch"),
        "tokens_per_second": low,
        "spread": spread,
        "step_us": row.number("step_us", 0.0, least=0),
        "shares": {"share": classes, "us_per_step": taken} if classes else None,
    }


def _traces(args: argparse.Namespace) -> tuple[Trace, Trace]:
    """The whole trace, and the split of it that was asked for."""
    from seqmoe_jax.traces.format import read_trace

    whole = read_trace(args.trace)
    return whole, whole.select(args.split) if args.split else whole
