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


class StagedLink(NamedTuple):
    """Of an engine that puts experts into device memory between steps: the next step copies them into their slots."""

    transfer_cost: Float32[Array, ""]  # RHO, as measured so far
    arrivals: Arrivals

    @property
    def board(self) -> None:
        """Plans reach such an engine in the step's output."""
        return None


class LiveLink(NamedTuple):
    """Of an engine that writes into the slots itself while the step runs: memory through which both talk."""

    transfer_cost: Float32[Array, ""]  # RHO, as measured so far
    landed: Int32[Array, " S"]  # tags of the slots' transfers, written by the engine
    progress: Int32[Array, " P"]  # pinned_host, written by the step
    board: Int32[Array, " W"]  # pinned_host, plans, written by the step


Link = StagedLink | LiveLink  # what a transfer engine gives to a step
