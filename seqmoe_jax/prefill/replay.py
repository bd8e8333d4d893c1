"""Recorded routing forced upon a prompt, for benchmarks alone.

A prompt replays the steps before those that decoding will replay. `replayed` replaces what a pass reads, once, before
its first layer; after that only the choice of the router is replaced, by `choice`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from seqmoe_jax.decode.step import Replay


class Recorded(NamedTuple):
    """The routing that was recorded for every position of a pass, or of a chunk."""

    ids: Int32[Array, "B P L K"]
    weights: Float32[Array, "B P L K"]


@jax.jit
def replayed(
    replay: Replay, steps: Int[Array, ""], lengths: Int[Array, " B"], positions: Int[Array, "B P"]
) -> tuple[Int32[Array, "B P"], Recorded]:
    """The recorded tokens and their routing for a pass, so that the prompts end before step `steps`."""
    rows = (steps - lengths[:, None] + positions) % replay.tokens.shape[0]
    return replay.tokens[rows], Recorded(replay.ids[rows], replay.weights[rows])


def choice(
    ids: Int[Array, "T K"], weights: Float[Array, "T K"], recorded: Recorded | None, moe_index: Int[Array, ""]
) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
    """The router's choice, or what was recorded instead of it.

    The result depends on the router's own choice, so that the router's work is done and timed.
    """
    if recorded is None:
        return ids, weights
    forced = recorded.ids[:, :, moe_index].reshape(ids.shape)
    return jnp.where(ids >= 0, forced, ids), recorded.weights[:, :, moe_index].reshape(ids.shape)


def coming_tokens(tokens: Int[Array, " B"], replay: Replay | None, steps: Int[Array, ""]) -> Int[Array, " B"]:
    """The tokens that step `steps` processes: those just sampled, or what was recorded instead of them."""
    if replay is None:
        return tokens
    return jnp.broadcast_to(replay.tokens[steps % replay.tokens.shape[0]], tokens.shape)
