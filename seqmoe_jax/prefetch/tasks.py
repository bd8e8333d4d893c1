"""Prefetch tasks: what may be moved, how surely it is needed, and until when; in order of deadline.

A position is step * L + layer, as in section 3.2 of the paper. Functions are compiled with numba; lists of tasks are
arrays with room for N of which the first `size` count.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np

from seqmoe_jax.prefetch.compiled import inlined

TASK = np.dtype(
    [
        ("key", "i8"),  # layer * E + expert
        ("confidence", "f8"),  # expected contribution to expert hits
        ("deadline", "i8"),  # position at which the expert's layer runs
        ("slot", "i8"),  # reserved for the expert
        ("tag", "i8"),  # grows with every task; a landing counts only while its slot expects its tag
        ("saving", "f8"),  # scratch of `schedule.choose`
        ("kept", "i8"),  # scratch of `schedule.choose`
    ]
)


@inlined
@no_type_check
def add(tasks, size, key, confidence, deadline, slot, tag):
    """Behind those of the same deadline. Returns the new size."""
    at = size
    while at > 0 and tasks[at - 1].deadline > deadline:
        tasks[at] = tasks[at - 1]
        at -= 1
    new = tasks[at]
    new.key, new.confidence, new.deadline, new.slot, new.tag = key, confidence, deadline, slot, tag
    return size + 1


@inlined
@no_type_check
def remove(tasks, size, index):
    """Returns the new size."""
    for following in range(index + 1, size):
        tasks[following - 1] = tasks[following]
    return size - 1
