"""`seqmoe plot`: recall per layer, hit rate against residency, activations, benchmarks, as image files.

Needs matplotlib.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqmoe_jax.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from seqmoe_jax.traces.format import Trace

FORMATS = (".png", ".svg", ".pdf")
DPI = 160
RESIDENCIES = (0.1, 0.15, 0.25, 0.35, 0.45, 0.6, 0.8)
POLICIES = ("lru", "lfu", "prefill-hot", "belady", "belady-8")  # those that need no forecasts
SHOWN = ("lru", "lfu", "prefill-hot", "belady")
# Okabe and Ito's colours, told apart by colour-blind readers too; black is left for limits that nothing can reach.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"
LIMITS = ("belady", "belady-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")

    def kind(name: str, text: str) -> argparse.ArgumentParser:
        each = kinds.add_parser(name, help=text, description=text)
        each.add_argument("--out", type=Path, required=True, metavar="FILE", help="ends in .png, .svg or .pdf")
        each.add_argument("--json", action="store_true", help="print what is drawn as JSON")
        return each

    recall = kind("recall", "recall per layer, from what `seqmoe evaluate --json` or `train-predictor` wrote")
    recall.add_argument("evaluation", type=Path, metavar="E.json")
    recall.add_argument("--split", help="where it holds several (default: the first)")
    rate = kind("hit-rate", "hit rate of caching policies against residency, simulated on a trace")
    rate.add_argument("trace", metavar="T.npz")
    rate.add_argument("--split", help="sequences of this split alone")
    rate.add_argument("--policies", nargs="+", choices=POLICIES, default=list(SHOWN), metavar="P",
                      help=f"of {', '.join(POLICIES)} (default: {' '.join(SHOWN)})")  # fmt: skip
    rate.add_argument("--residencies", nargs="+", type=float, default=list(RESIDENCIES), metavar="R")
    rate.add_argument("--predictor", metavar="auto|DIR", help="adds eviction by its forecasts")
    rate.add_argument("--model", metavar="ID", help="the model of the trace (default: what the trace says)")
    rate.add_argument("--skip", type=int, default=500, metavar="N", help="first steps not counted (default: 500)")
    heat = kind("heatmap", "how often each expert is activated, and one sequence step by step")
    heat.add_argument("trace", metavar="T.npz")
    heat.add_argument("--split", help="sequences of this split alone")
    heat.add_argument("--sequence", type=int, default=0, metavar="I", help="which one to show (default: the first)")
    bench = kind("bench", "speed against residency and, if profiled, time shares, from what `seqmoe bench --out` wrote")
    bench.add_argument("result", type=Path, metavar="B.json")


def run(args: argparse.Namespace) -> int:
    check_output(args.out)
    kinds = {"recall": _recall, "hit-rate": _hit_rate, "heatmap": _heatmap, "bench": _bench}
    figure, drawn = kinds[args.kind](args)
    figure.savefig(args.out, dpi=DPI)
    print(json.dumps({"file": str(args.out)} | drawn) if args.json else str(args.out))
    return 0


def check_output(path: Path, option: str = "--out") -> None:
    """Raises `ConfigError` where no figure can be written there."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"{option} {path}: expected a name that ends in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: no directory {path.parent}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'seqmoe-jax[plot]'") from None


def read_evaluation(path: Path, split: str | None = None) -> tuple[dict[str, Any], str | None]:
    """Rows of a recall table by predictor, and the split they are of. Raises `ConfigError`."""
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected the JSON of an evaluation, got {error}") from None
    splits = said.get("splits", {}) if isinstance(said, dict) else {}
    if splits:
        split = split or next(iter(splits))
        if split not in splits:
            raise ConfigError(f"{path} has no split {split!r}: expected one of {', '.join(splits)}")
        said = splits[split]
    rows = said.get("predictors") if isinstance(said, dict) else None
    if not rows or not all("per_layer" in row and "recall_at" in row for row in rows.values()):
        raise ConfigError(f"{path}: expected the JSON of `seqmoe evaluate --json`, got no rows with 'per_layer'")
    return rows, split


def _recall(args: argparse.Namespace) -> tuple[Figure, dict[str, Any]]:
    rows, split = read_evaluation(args.evaluation, args.split)
    return recall_figure(rows, split), {"predictors": {name: row["per_layer"] for name, row in rows.items()}}


def recall_figure(rows: Mapping[str, Any], split: str | None = None) -> Figure:
    """Recall at top K+3 of every layer, a line per predictor; dashed, what the mid-step refinement makes of it."""
    figure, axes = _figure(9.0, 4.2)
    for index, (name, row) in enumerate(rows.items()):
        recall, colour = row["per_layer"], COLOURS[index % len(COLOURS)]
        mean = 100 * sum(recall) / len(recall)
        percent = [100 * value for value in recall]
        axes.plot(percent, color=colour, marker=MARKERS[index % len(MARKERS)], label=f"{name} (mean {mean:.1f} %)")
        refined = row.get("refined")
        if refined:
            first = refined["trigger"]
            after = [100 * value for value in refined["per_layer"]]
            label = f"refined at layer {first}"
            axes.plot(range(first, first + len(after)), after, color=colour, linestyle="--", label=label)
    row = next(iter(rows.values()))
    top = list(row["recall_at"])[3]
    where = "" if split is None else f"split {split}, "
    axes.set_title(f"Routed experts among the top {top} forecast\n{where}{row['steps']:,} steps")
    axes.set_xlabel("MoE layer")
    axes.set_ylabel("recall (%)")
    axes.set_xlim(-0.4, len(row["per_layer"]) - 0.6)
    axes.set_ylim(top=100)
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(frameon=False, loc="outside right upper")
    return figure


def _hit_rate(args: argparse.Namespace) -> tuple[Figure, dict[str, Any]]:
    from tqdm import tqdm

    from seqmoe_jax.simulation.simulator import Simulation, simulate

    trace = _trace(args)
    policies, forecasts = list(args.policies), None
    if args.predictor is not None:
        from seqmoe_jax.forecast import store
        from seqmoe_jax.forecast.evaluation.export import forecasts_of

        directory = store.require_predictor(args.predictor, args.model or trace.model, **trace.sizes)
        forecasts = forecasts_of(*store.load(directory), trace, rollout=0)
        policies.insert(0, "forecast-direct")
    curves: dict[str, list[float]] = {policy: [] for policy in policies}
    points = [(policy, residency) for policy in policies for residency in sorted(args.residencies)]
    for policy, residency in tqdm(points, disable=args.json or not sys.stderr.isatty(), leave=False):
        config = Simulation(residency=residency, policy=policy, skip=args.skip)
        curves[policy].append(simulate(trace, config, forecasts).hit_rate)
    title = f"{trace.model or 'Trace'}: {trace.layers} layers, {trace.num_experts} experts, {trace.active} active"
    drawn = {"residencies": sorted(args.residencies), "hit_rates": curves}
    return hit_rate_figure(sorted(args.residencies), curves, title), drawn


def hit_rate_figure(residencies: Sequence[float], curves: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Hit rate against residency, a line per policy; those that know the future are black."""
    figure, axes = _figure(8.4, 4.4)
    names = {"forecast-direct": "forecast", "belady": "Belady (knows the future)"}
    coloured = 0
    for policy, rates in curves.items():
        style: dict[str, Any] = {"color": "black", "linestyle": ":", "marker": "."}
        if policy not in LIMITS:
            style = {"color": COLOURS[coloured % len(COLOURS)], "marker": MARKERS[coloured % len(MARKERS)]}
            coloured += 1
        axes.plot([100 * r for r in residencies], [100 * r for r in rates], label=names.get(policy, policy), **style)
    low, high = 0, 100 * max(residencies)
    axes.plot([low, high], [low, high], color="0.6", linewidth=1, linestyle="--", label="experts at random", zorder=1)
    axes.set_title(f"{title}\ncaching by demand alone")
    axes.set_xlabel("residency: experts with a slot (%)")
    axes.set_ylabel("hit rate (%)")
    axes.set_xlim(0, high * 1.03)
    axes.set_ylim(0, 101)
    figure.legend(frameon=False, loc="outside right upper")
    return figure


def _heatmap(args: argparse.Namespace) -> tuple[Figure, dict[str, Any]]:
    trace = _trace(args)
    if not 0 <= args.sequence < trace.sequences:
        raise ConfigError(f"--sequence must be from 0 to {trace.sequences - 1}, got {args.sequence}")
    drawn = {"sequence": args.sequence, "steps": int(trace.lens[args.sequence])}
    return heatmap_figure(trace, args.sequence), drawn


def heatmap_figure(trace: Trace, sequence: int) -> Figure:
    """Left: share of decoded steps that activate each expert. Right: one sequence, its steps against all experts."""
    import numpy as np

    from seqmoe_jax.simulation.forecasters import mixture

    decoded = trace.without_prompts()
    everything = dataclasses.replace(decoded, prefill_lens=decoded.lens)  # popularity over what was decoded
    share = 100 * everything.popularity()
    start, stop = trace.spans()[sequence]
    weights = mixture(trace, start, stop).reshape(stop - start, -1).T
    figure, (left, right) = _figure(11.0, 4.8, columns=2, ratios=(1.0, 1.6))
    even = 100 * trace.active / trace.num_experts
    image = left.imshow(share, aspect="auto", cmap="viridis", origin="lower", vmin=0, interpolation="nearest")
    bar = figure.colorbar(image, ax=left)
    bar.set_label("steps that activate it (%)")
    bar.ax.axhline(even, color="white", linewidth=2)
    left.set_title(f"Use of the experts ({decoded.steps:,} decoded steps;\nwhite mark: even use, {even:.1f} %)")
    left.set_xlabel("expert")
    left.set_ylabel("MoE layer")
    highest = float(np.quantile(weights[weights > 0], 0.99))
    shown = right.imshow(
        weights, aspect="auto", cmap="BuPu", origin="lower", vmin=0, vmax=highest, interpolation="nearest"
    )
    figure.colorbar(shown, ax=right).set_label("router's weight of an active expert")
    prompt = 0 if trace.prefill_lens is None else int(trace.prefill_lens[sequence])
    if prompt:
        right.axvline(prompt - 0.5, color="#D55E00", linewidth=1.5)
    about = f" (left of the line: {prompt} prompt tokens)" if prompt else ""
    right.set_title(f"Sequence {sequence}, token by token{about}")
    right.set_xlabel("step")
    right.set_ylabel(f"MoE layer ({trace.num_experts} experts in each)")
    for layer in range(1, trace.layers):
        right.axhline(layer * trace.num_experts - 0.5, color="0.85", linewidth=0.5)
    every = max(1, trace.layers // 8)
    ticks = range(0, trace.layers, every)
    right.set_yticks([layer * trace.num_experts - 0.5 for layer in ticks], [str(layer) for layer in ticks])
    return figure


def _bench(args: argparse.Namespace) -> tuple[Figure, dict[str, Any]]:
    try:
        result = json.loads(args.result.read_text())
        rows = [row for row in result["rows"] if "error" not in row]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{args.result}: expected the JSON of `seqmoe bench --out`, got {error!r}") from None
    if not rows:
        raise ConfigError(f"{args.result}: no row of it was measured")
    drawn = {"rows": [{key: row[key] for key in ("name", "residency", "batch", "tokens_per_second")} for row in rows]}
    return bench_figure(result), drawn


def bench_figure(result: Mapping[str, Any]) -> Figure:
    """Left: tokens per second against residency, a line per setting, bars from least to most. Right, where rows have
    time shares: what a step's launches take, by class; the black mark is the step as timed, without the profiler.
    """
    rows = [row for row in result["rows"] if "error" not in row]
    profiled = [row for row in rows if row.get("shares") and "error" not in row["shares"]]
    figure, axes = _figure(12.0 if profiled else 7.2, 4.4, columns=2 if profiled else 1)
    left = axes[0] if profiled else axes
    several = len({row["batch"] for row in rows}) > 1
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        name = "full load" if row["name"] == "full" else row["name"]
        lines.setdefault(f"{name}, batch {row['batch']}" if several else name, []).append(row)
    for index, (name, each) in enumerate(lines.items()):
        each = sorted(each, key=lambda row: row["residency"])
        speeds = [row["tokens_per_second"] for row in each]
        below = [row["tokens_per_second"] - row["spread"][0] for row in each]
        above = [row["spread"][1] - row["tokens_per_second"] for row in each]
        colour = "black" if name.startswith("full") else COLOURS[index % len(COLOURS)]
        left.errorbar([100 * row["residency"] for row in each], speeds, yerr=[below, above], label=name, capsize=3,
                      marker=MARKERS[index % len(MARKERS)], color=colour)  # fmt: skip
    left.set_title(f"{result['model']} on {result['device']}\nmedian of {max(1, result['repeats'])}, least to most")
    left.set_xlabel("residency: experts with a slot (%)")
    left.set_ylabel("tokens per second, all sequences")
    left.set_ylim(bottom=0)
    left.legend(frameon=False)
    if profiled:
        _draw_shares(axes[1], profiled, several)
    return figure


def _draw_shares(axes: Any, rows: Sequence[Mapping[str, Any]], several: bool) -> None:
    labels = [
        f"{row['name']} {100 * row['residency']:.0f} %" + (f", batch {row['batch']}" if several else "") for row in rows
    ]
    starts = [0.0] * len(rows)
    for index, name in enumerate(rows[0]["shares"]["share"]):
        widths = [row["shares"]["us_per_step"][name] / 1e3 for row in rows]
        colour = "0.7" if name == "other" else COLOURS[index % len(COLOURS)]
        label = "on-demand stall" if name == "stall" else name
        axes.barh(range(len(rows)), widths, left=starts, label=label, color=colour, height=0.65)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    times = [row["step_us"] / 1e3 for row in rows]
    axes.plot(times, range(len(rows)), linestyle="", marker="|", markersize=22, markeredgewidth=2, color="black",
              label="step, timed")  # fmt: skip
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per step")
    axes.set_title("Where the time of a step goes\n(launches under the profiler, gaps left out)")
    axes.legend(
        frameon=False, fontsize="small", markerscale=0.4, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.15)
    )


def _trace(args: argparse.Namespace) -> Trace:
    from seqmoe_jax.traces.format import read_trace

    trace = read_trace(args.trace)
    return trace.select(args.split) if args.split else trace


def _figure(width: float, height: float, *, columns: int = 1, ratios: Sequence[float] | None = None) -> tuple[Any, Any]:
    """A figure in inches and its axes, without a window system."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, width_ratios=ratios)
    for each in [axes] if columns == 1 else axes:
        each.spines[["top", "right"]].set_visible(columns > 1)
        if columns == 1:
            each.grid(axis="y", color="0.9")
            each.set_axisbelow(True)
    return figure, axes
