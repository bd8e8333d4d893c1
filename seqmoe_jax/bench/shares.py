"""Where the time of a decode step goes (paper, Figure 9), from a profile of the device.

Under the profiler XLA launches every kernel by itself instead of replaying CUDA graphs, unless it is told otherwise.
Kernels take as long as ever, the gaps between them do not: read the microseconds of a class against the step time
measured without the profiler.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seqmoe_jax.errors import ProfileError

# The classes of Figure 9, and the named scopes of the decode step in each. The innermost scope decides.
CLASSES: dict[str, tuple[str, ...]] = {
    "compute": ("embed", "mixer", "moe", "mlp", "head", "sample"),
    "predictor": ("forecast", "refine"),
    "management": ("slot_update", "plan", "rescore", "landing"),
    "stall": ("miss_load", "wait"),
    "other": ("other",),
}
CLASS_OF = {part: name for name, parts in CLASSES.items() for part in parts}
# The scope of our kernels, for profiles that do not say it.
SCOPE_OF_KERNEL = {
    "slot_update": "slot_update",
    "miss_load": "miss_load",
    "plan_tasks": "plan",
    "fused_moe_up": "moe",
    "fused_moe_load_and_up": "moe",
    "fused_moe_up_late": "moe",
    "fused_moe_down": "moe",
    "router_choice": "moe",
    "matvec_qkv": "mixer",
    "matvec_out": "mixer",
    "matvec_router": "moe",
    "matvec_head": "head",
    "decode_attention": "mixer",
    "decode_attention_combine": "mixer",
}
TOP = 20  # kernels listed


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel or copy on the device. `scope` is the path of named scopes it was traced in; times in microseconds."""

    name: str
    scope: str
    start: float
    duration: float

    @property
    def part(self) -> str:
        """The named scope it counts for: one of `CLASSES`."""
        for scope in reversed(self.scope.split("/")):
            if scope in CLASS_OF:
                return scope
        return SCOPE_OF_KERNEL.get(self.kernel, "other")

    @property
    def kernel(self) -> str:
        """Its name without the number that tells instances apart."""
        return re.sub(r"([._]+\d*)+$", "", self.name)


def shares_of(launches: Sequence[Launch], steps: int, *, engine: bool = False) -> dict[str, Any]:
    """Microseconds per step by class and by scope, and the kernels that take most.

    The four classes of Figure 9, what belongs to none (`other`), and the gaps (`idle`) between the first start and the
    last end; `share` is of the time that is not idle. Two kernels do work of two classes: what a launch takes beyond a
    usual one is stall. With a transfer `engine`, `slot_update` also waits for experts under way (`wait`); the median
    launch is usual. `fused_moe_load_and_up` computes while it loads what is missing (`miss_load`); usual is the median
    of those up to twice as long as the shortest, which load nothing, if there are such. Where every launch loads
    something, the shortest counts as compute, and the stall is a lower bound.
    """
    if not launches or steps < 1:
        raise ProfileError(f"expected launches of at least one step, got {len(launches)} of {steps}")
    parts: dict[str, float] = defaultdict(float)
    kernels: dict[tuple[str, str], list[float]] = defaultdict(list)
    for launch in launches:
        parts[launch.part] += launch.duration
        kernels[launch.kernel, launch.part].append(launch.duration)
    if engine and (updates := _durations(launches, "slot_update")):
        waited = _beyond(statistics.median(updates), updates)
        parts["slot_update"] -= waited
        parts["wait"] += waited
    if ups := _durations(launches, "fused_moe_load_and_up"):
        without_loads = 2 * min(ups)
        loaded = _beyond(statistics.median(up for up in ups if up <= without_loads), ups)
        parts["moe"] -= loaded
        parts["miss_load"] += loaded
    by_class = {name: sum(parts.get(part, 0.0) for part in members) for name, members in CLASSES.items()}
    busy = sum(by_class.values())
    ranked = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    return {
        "steps": steps,
        "us_per_step": {name: us / steps for name, us in (by_class | {"idle": _idle(launches)}).items()},
        "share": {name: us / busy for name, us in by_class.items()},
        "parts_us": {part: us / steps for part, us in sorted(parts.items(), key=lambda item: -item[1])},
        "launches_per_step": len(launches) / steps,
        "kernels": [
            {
                "kernel": kernel,
                "scope": part,
                "us_per_step": sum(each) / steps,
                "launches_per_step": len(each) / steps,
                "us_each": statistics.median(each),
            }
            for (kernel, part), each in ranked[:TOP]
        ],
    }


def _durations(launches: Sequence[Launch], kernel: str) -> list[float]:
    return [launch.duration for launch in launches if launch.kernel == kernel]


def _beyond(usual: float, durations: Sequence[float]) -> float:
    return sum(max(0.0, duration - usual) for duration in durations)


def _idle(launches: Sequence[Launch]) -> float:
    idle, end = 0.0, min(launch.start for launch in launches)
    for launch in sorted(launches, key=lambda launch: launch.start):
        idle += max(0.0, launch.start - end)
        end = max(end, launch.start + launch.duration)
    return idle


def describe(row: Mapping[str, Any]) -> str:
    """The shares of one row of the benchmark as lines for a person."""
    shares = row["shares"]
    if "error" in shares:
        return f"  no time shares: {shares['error']}"
    times = ", ".join(
        f"{name} {us:.0f} us" + (f" ({100 * shares['share'][name]:.1f} %)" if name in shares["share"] else "")
        for name, us in shares["us_per_step"].items()
    )
    lines = [
        f"  a step as timed: {row['step_us']:.0f} us; under the profiler, {shares['steps']} steps: {times}; "
        f"{shares['launches_per_step']:.0f} launches a step, copies beside it {shares['copies_beside_us']:.0f} us",
        "  kernel                                   scope          us/step  launches  us each",
    ]
    lines += [
        f"  {row['kernel'][:40]:40} {row['scope']:12} {row['us_per_step']:9.1f} {row['launches_per_step']:9.1f} "
        f"{row['us_each']:8.1f}"
        for row in shares["kernels"]
    ]
    return "\n".join(lines)
