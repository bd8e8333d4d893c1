"""Static shape of planning, and what a plan looks like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Array, Int32

from pallas_kernels.slot_update.tables import SlotTables

KEY, CONFIDENCE, DEADLINE, SLOT, TAG = range(5)  # rows of a plan
# The words of a board: the plan's number, the position it was made at, the sum of all other words (int32, wrapping),
# and from FIRST_TASK on the rows of the plan.
NUMBER, BASE, CHECK, FIRST_TASK = range(4)
CONFIDENCE_UNIT = 1 << 20
LAST_TAG = (1 << 29) - 1


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Static shape of planning. Hashable: part of a static argument."""

    layers: int  # L
    experts: int  # E
    tasks: int = 8  # N, most tasks open at a time; each holds a slot
    threshold: float = 0.2  # least chance of being routed
    keep: int = 8  # slots that are never reserved: one layer's misses and hits must fit beside the tasks

    @property
    def board_words(self) -> int:
        """Words of host memory that a plan is written to."""
        return FIRST_TASK + 5 * self.tasks


class Planned(NamedTuple):
    """What `plan_tasks` returns."""

    tables: SlotTables
    next_tag: Int32[Array, ""]
    tasks: Int32[Array, "5 N"]
    """The open tasks: key (-1: none), confidence in `CONFIDENCE_UNIT`, deadline (a position), slot (under key -1 that
    of a landed expert that waits for its layer, or -1), tag."""
