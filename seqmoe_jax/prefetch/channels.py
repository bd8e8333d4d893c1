"""Where host callbacks of compiled steps deliver plans: a step knows its engine by number, not as an object."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int32

Receiver = Callable[[Int32[np.ndarray, "5 N"], int], None]  # a step's last plan, and the position at the step's end

_receivers: dict[int, Receiver] = {}
_numbers = itertools.count()


def open_channel(receiver: Receiver) -> int:
    number = next(_numbers)
    _receivers[number] = receiver
    return number


def close_channel(number: int) -> None:
    _receivers.pop(number, None)


def deliver(number: Any, tasks: Any, clock: Any) -> None:
    """The host callback. Receivers only enqueue: JAX must not be called from here."""
    receiver = _receivers.get(int(number))
    if receiver is not None:
        receiver(np.asarray(tasks), int(clock))
