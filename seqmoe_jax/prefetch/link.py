"""What passes between the decode step and a transfer engine."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float32, Int32, Shaped


class Arrivals(NamedTuple):
    """Experts that the engine has put into device memory since the last step, one array each, and where they belong.

    A tag of 0 is no arrival; a negative one gives the task up.
    """

    blocks: tuple[Shaped[Array, " n"], ...]
    slot: Int32[Array, " A"]
    tag: Int32[Array, " A"]


class Link(NamedTuple):
    """What a transfer engine gives to a step: arrivals, or memory through which both talk while the step runs."""

    transfer_cost: Float32[Array, ""]  # RHO, as measured so far
    arrivals: Arrivals | None = None
    landed: Int32[Array, " S"] | None = None  # tags of the slots' transfers, written by the engine
    progress: Int32[Array, " P"] | None = None  # pinned_host, written by the step
    board: Int32[Array, " W"] | None = None  # pinned_host, plans, written by the step
