"""Every program that requests can need, made before the first of them comes.

The code that runs requests is run once without a device: its programs are prepared, and shapes stand for what they
would have given. So what is made here is what will be asked for, under the same keys.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from seqmoe_jax.lanes import Lanes
from seqmoe_jax.offloading import Offloading
from seqmoe_jax.programs import Programs, on_device, shapes_of


class _Rehearsal(Programs):
    """Stands in for an engine's programs."""

    def __init__(self, programs: Programs, device: jax.Device):
        self._real, self._device = programs, device
        self._results: dict[Any, Any] = {}

    def prepare(self, key: Any, what: str, function: Any, *args: Any, kept: bool = True, **static: Any) -> None:
        self._real.prepare(key, what, function, *shapes_of(args), kept=kept, **static)

    def get(self, key: Any, what: str, function: Any, *args: Any, **static: Any) -> Any:
        if key not in self._results:
            self.prepare(key, what, function, *args, **static)
            shapes = jax.eval_shape(partial(function, **static), *shapes_of(args))
            self._results[key] = on_device(shapes, self._device)
        return lambda *_: self._results[key]


class _Shapes(Offloading):
    """Stands in for an engine's offloading."""

    def __init__(self, real: Offloading):
        self.transfers, self.state = real.transfers, shapes_of(real.state._replace(predictor=None))


def warm_up(lanes: Lanes, progress: Callable[[int, int], None] | None = None) -> None:
    """Makes the programs of `lanes`, for whatever may be added to them. `progress` is told how many of how many there
    are."""
    real, device = lanes.programs, lanes.reader.device
    lanes.offloading.warm_up()
    reader = copy.copy(lanes.reader)
    rehearsal = reader.programs = _Rehearsal(real, device)
    stand_in = Lanes(
        offloading=_Shapes(lanes.offloading), reader=reader, programs=rehearsal, step_configs=lanes.step_configs,
        most=lanes.most,
    )  # fmt: skip
    stand_in.rehearse(reader.rehearse(stand_in.offloading, lanes.most))
    real.wait(progress)
