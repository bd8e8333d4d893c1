"""Recorded routing forced upon a prompt, for benchmarks alone.

A prompt replays the steps before those that decoding will replay. `replayed` replaces what a chunk reads, once, before
its first layer; after that only the choice of the router is replaced, by `choice`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from seqmoe_jax.decode.replay import Replay
from seqmoe_jax.programs import owned


class RecordedPart(NamedTuple):
    """The routing that was recorded for every position of a chunk."""

    ids: Int32[Array, "T L K"]
    weights: Float32[Array, "T L K"]


@owned
@jax.jit
def replayed(
    replay: Replay, steps: Int[Array, ""], before: Int[Array, " T"]
) -> tuple[Int32[Array, " T"], RecordedPart]:
    """The recorded tokens and their routing for a chunk whose tokens stand so many positions `before` the end of their
    prompt, so that it ends before step `steps`."""
    rows = (steps - before) % replay.tokens.shape[0]
    return replay.tokens[rows], RecordedPart(replay.ids[rows], replay.weights[rows])


def choice(
    ids: Int[Array, "T K"], weights: Float[Array, "T K"], recorded: RecordedPart | None, moe_index: Int[Array, ""]
) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
    """The router's choice, or what was recorded instead of it.

    The result depends on the router's own choice, so that the router's work is done and timed.
    """
    if recorded is None:
        return ids, weights
    return jnp.where(ids >= 0, recorded.ids[:, moe_index], ids), recorded.weights[:, moe_index]
