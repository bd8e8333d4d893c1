"""Forecasts over a trace: what a predictor says at every step, as arrays and as an `npz`.

This is all that the simulator needs of a predictor. Row t belongs to step t of the trace that the forecasts were made
for (after `Trace.select`, where a split was chosen). Nothing in a row may come from another sequence; the first row of
a sequence is what is said before anything is known of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float16, Integer

from seqmoe_jax.errors import TraceError
from seqmoe_jax.traces.archive import read_arrays, write_arrays
from seqmoe_jax.traces.format import Trace

_MOST, _MINUS_ZERO = np.array([1.01, -0.0], np.float16).view(np.uint16)
_ARRAYS = ("next", "refined", "early", "retention", "rollout")


@dataclass(frozen=True, kw_only=True)
class Forecasts:
    """Probabilities in [0, 1] that an expert is activated; they sum to about K per layer.

    `next`: of step t, made after step t-1.
    `refined`: of step t, made in the middle of it, when the routing of the layers below `trigger` is known. Rows of
    those layers mean nothing.
    `early`: of step t, made in the middle of step t-1 at `trigger`: the paper's first predictor. Only the layers below
    `trigger` mean anything.
    `retention`: made after step t-1, about the steps after t (step t itself is in `next`): a score in [0, 1] of how
    often and how soon they use an expert, such as (1 - d) * sum over j >= 1 of d**(j-1) * [used in step t + j].
    `rollout`: [t, j] is of step t + 1 + j, made after step t-1 (the paper's A'', which starts one step after `next`).
    """

    next: Float16[np.ndarray, "T L E"]
    refined: Float16[np.ndarray, "T L E"] | None = None
    early: Float16[np.ndarray, "T L E"] | None = None
    trigger: int | None = None
    retention: Float16[np.ndarray, "T L E"] | None = None
    rollout: Float16[np.ndarray, "T c L E"] | None = None
    name: str = "forecast"

    def check(self, trace: Trace) -> None:
        """`TraceError` unless these are forecasts for that trace."""
        expected = (trace.steps, trace.layers, trace.num_experts)
        for name in _ARRAYS:
            array = getattr(self, name)
            if array is None:
                continue
            shape = array.shape if name != "rollout" else (array.shape[0], *array.shape[2:])
            if shape != expected:
                raise TraceError(
                    f"the forecasts are for another trace: {name} has (steps, layers, experts) {shape}, "
                    f"the trace {expected}"
                )
            # From 0 on, floats are ordered as their bits are, and NaN and negative ones (but -0) come after all others:
            # one comparison of integers for each value.
            bits = array.view(np.uint16)
            if array.size and bits.max() > _MOST and ((bits > _MOST) & (bits != _MINUS_ZERO)).any():
                raise TraceError(f"forecasts: {name} has values outside [0, 1], expected probabilities")
        if (self.refined is not None or self.early is not None) and not (
            self.trigger is not None and 0 < self.trigger < trace.layers
        ):
            raise TraceError(
                f"forecasts made in mid-step need a trigger layer from 1 to {trace.layers - 1}, got {self.trigger}"
            )

    def take(self, steps: Integer[np.ndarray, " t"] | Bool[np.ndarray, " T"]) -> Forecasts:
        """Those of some steps, by index or mask."""
        cut = {name: getattr(self, name)[steps] for name in _ARRAYS if getattr(self, name) is not None}
        return Forecasts(**cut, trigger=self.trigger, name=self.name)


def write_forecasts(path: str | os.PathLike[str], forecasts: Forecasts) -> None:
    """One `npz`, not compressed: these are large and read once. It appears whole or not at all."""
    arrays = {name: getattr(forecasts, name) for name in (*_ARRAYS, "trigger", "name")}
    write_arrays(path, {name: value for name, value in arrays.items() if value is not None}, compressed=False)


def read_forecasts(path: str | os.PathLike[str], trace: Trace | None = None) -> Forecasts:
    """Reads, and checks against the trace if there is one."""
    arrays = read_arrays(path, "a file of forecasts", _check_headers)
    forecasts = Forecasts(
        **{name: arrays[name] for name in _ARRAYS if name in arrays},
        trigger=int(arrays["trigger"]) if "trigger" in arrays else None,
        name=str(arrays.get("name", Path(path).stem)),
    )
    if trace is not None:
        try:
            forecasts.check(trace)
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from None
    return forecasts


def _check_headers(arrays: Mapping[str, Any]) -> None:
    """Raises `TraceError` for an array that is missing, of another dtype or of another rank."""
    if "next" not in arrays:
        raise TraceError(f"missing next: a file of forecasts has it, and may have {', '.join(_ARRAYS[1:])}")
    ranks = dict.fromkeys(_ARRAYS, ("float16", 3)) | {
        "rollout": ("float16", 4), "trigger": ("an integer", 0), "name": ("text", 0)
    }  # fmt: skip
    kinds = {"float16": "f", "an integer": "iu", "text": "U"}
    for name, header in arrays.items():
        if name not in ranks:
            raise TraceError(f"unknown array {name[:60]!r}; known are {', '.join(ranks)}")
        kind, rank = ranks[name]
        right = header.dtype.kind in kinds[kind] and (kind != "float16" or header.dtype == np.float16)
        if not right or header.ndim != rank:
            raise TraceError(f"{name} is {header.dtype} of {header.ndim} dimensions, expected {kind} of {rank}")
