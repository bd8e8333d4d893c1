"""Figures of recall per layer, of hit rate against residency, of activations and of benchmarks. Needs matplotlib.

Every function returns a `matplotlib.figure.Figure`, which a notebook shows and `savefig` writes.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from seqmoe_jax.errors import ConfigError
from seqmoe_jax.outputs.files import check_file, writing
from seqmoe_jax.outputs.runs import Run, check_replaced, from_json, to_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from seqmoe_jax.research.predictors import Evaluation
    from seqmoe_jax.traces.format import Trace

FORMATS = (".png", ".svg", ".pdf")
DPI = 160
MOST_BYTES = 64 << 20  # of an image that is read to see what it is
# Okabe and Ito's colours, told apart by colour-blind readers too; black is left for limits that nothing can reach.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"
RESIDENCIES = (0.1, 0.15, 0.25, 0.35, 0.45, 0.6, 0.8)
SHOWN = ("lru", "lfu", "prefill-hot", "belady")
LIMITS = ("belady", "belady-8")  # policies that know the future


def check_output(path: Path, run: Run, *, force: bool) -> None:
    """Raises `ConfigError` or `OutputError` where no figure of this run can be written."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path}: expected a name that ends in {', '.join(FORMATS)}")
    check_file(path)
    check_replaced(path, "figure of `seqmoe plot`", read_run, run, force=force)
    _check_installed()


def _check_installed() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'seqmoe-jax[plot]'") from None


def write(path: Path, figure: Figure, run: Run) -> None:
    """The figure as an image that says in its keywords which run it is of. Raises `OutputError`."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a name with dollars is no formula
    with writing(path) as file:
        # It ends in a mark of its own: whatever bytes come next in the file could else belong to it.
        about = {"Keywords": f"seqmoe-run:{quote(to_json(run), safe='')};"}
        figure.savefig(file, format=path.suffix[1:], dpi=DPI, metadata=about)


def read_run(path: Path) -> Run | None:
    """The run that an image is of, None where it does not say."""
    with path.open("rb") as file:
        said = re.search(rb"seqmoe-run:([\w.~%-]+);", file.read(MOST_BYTES))
    return from_json(unquote(said[1].decode())) if said else None


def recall(evaluation: Evaluation | Mapping[str, Any], split: str | None = None) -> Figure:
    """Recall at top K+3 of every layer, a line per predictor; dashed, what the mid-step refinement makes of it.

    `evaluation` is what `evaluate` returns, or rows of the same form by predictor; then `split` is for the title.
    """
    rows: Mapping[str, Any]
    rows, split = (evaluation, split) if isinstance(evaluation, Mapping) else (evaluation.rows, evaluation.split)
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


def about(trace: Trace) -> str:
    """What a trace is of, for a title."""
    return f"{trace.model or 'Trace'}: {trace.layers} layers, {trace.num_experts} experts, {trace.active} active"


def hit_rate(
    trace: Trace,
    *,
    residencies: Sequence[float] = RESIDENCIES,
    policies: Sequence[str] = SHOWN,
    predictor: str | Path | None = None,
    split: str | None = None,
    skip: int | None = None,
) -> Figure:
    """Hit rate of caching by demand alone against residency, simulated on a trace (`simulate` says what the options
    are). A `predictor` adds policy `seqmoe`. Takes a while for a long trace."""
    _check_installed()
    from seqmoe_jax.research.simulation import hit_rates

    each = sorted(residencies)
    curves = hit_rates(trace, residencies=each, policies=policies, predictor=predictor, split=split, skip=skip)
    return hit_rate_curves(each, curves, about(trace))


def hit_rate_curves(residencies: Sequence[float], curves: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Hit rate against residency, a line per policy; those that know the future are black."""
    figure, axes = _figure(8.4, 4.4)
    coloured = 0
    for policy, rates in curves.items():
        label = "Belady (knows the future)" if policy == "belady" else policy
        style: dict[str, Any] = {"color": "black", "linestyle": ":", "marker": "."}
        if policy not in LIMITS:
            style = {"color": COLOURS[coloured % len(COLOURS)], "marker": MARKERS[coloured % len(MARKERS)]}
            coloured += 1
        axes.plot([100 * r for r in residencies], [100 * r for r in rates], label=label, **style)
    low, high = 0, 100 * max(residencies)
    axes.plot([low, high], [low, high], color="0.6", linewidth=1, linestyle="--", label="experts at random", zorder=1)
    axes.set_title(f"{title}\ncaching by demand alone")
    axes.set_xlabel("residency: experts with a slot (%)")
    axes.set_ylabel("hit rate (%)")
    axes.set_xlim(0, high * 1.03)
    axes.set_ylim(0, 101)
    figure.legend(frameon=False, loc="outside right upper")
    return figure


def heatmap(trace: Trace, sequence: int = 0) -> Figure:
    """Left: share of decoded steps that activate each expert. Right: one sequence, its steps against all experts.

    Raises `ConfigError` where the trace has no such sequence.
    """
    if not 0 <= sequence < trace.sequences:
        raise ConfigError(f"sequence must be from 0 to {trace.sequences - 1}, got {sequence}")
    import numpy as np

    decoded = trace.without_prompts()
    everything = dataclasses.replace(decoded, prefill_lens=decoded.lens)  # popularity over what was decoded
    share = 100 * everything.popularity()
    start, stop = trace.spans()[sequence]
    weights = trace.weights(start, stop).reshape(stop - start, -1).T
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


def bench(result: Mapping[str, Any]) -> Figure:
    """A benchmark, the object that `seqmoe bench --json` prints.

    Left: tokens per second against residency, a line per setting, bars from least to most. Right, where rows have
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


@cache
def _shown_figure() -> type[Figure]:
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        """Made without `pyplot`, of which a notebook would show no more than the size."""

        def _repr_png_(self) -> bytes:
            with io.BytesIO() as file:
                self.savefig(file, format="png")
                return file.getvalue()

    return ShownFigure


def _figure(
    width: float, height: float, *, columns: int = 1, ratios: Sequence[float] | None = None
) -> tuple[Figure, Any]:
    """A figure in inches and its axes, without a window system."""
    _check_installed()
    figure = _shown_figure()(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, width_ratios=ratios)
    for each in [axes] if columns == 1 else axes:
        each.spines[["top", "right"]].set_visible(columns > 1)
        if columns == 1:
            each.grid(axis="y", color="0.9")
            each.set_axisbelow(True)
    return figure, axes
