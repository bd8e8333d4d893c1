"""Recorded routing that is forced upon a model, step after step, in a circle; for benchmarks alone.

These functions take `Replay | None`, so that the programs around them read alike with and without one. The model's own
routing is computed all the same, and what replaces it depends on it: the router's work is done and timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Int32

from pallas_kernels.router_choice.config import Recorded


class Replay(NamedTuple):
    """Routing and tokens of T decode steps."""

    ids: Int32[Array, "T L K"]
    weights: Float32[Array, "T L K"]
    tokens: Int32[Array, " T"]


def recorded_routing(replay: Replay | None, steps: Int[Array, ""], layer: Int[Array, ""]) -> Recorded | None:
    """What replaces the choice of MoE layer `layer` in the step after `steps` others."""
    if replay is None:
        return None
    return Recorded(replay.ids, replay.weights, steps % replay.tokens.shape[0], layer)


def forced_tokens(replay: Replay | None, steps: Int[Array, ""], sampled: Int[Array, " B"]) -> Int[Array, " B"]:
    """The tokens that a forecast made after `steps` steps is to believe in: the recorded one, or those `sampled`."""
    if replay is None:
        return sampled
    return jnp.broadcast_to(replay.tokens[steps % replay.tokens.shape[0]], sampled.shape)


def hash_tables_in_force(replay: Replay | None, tables: Mapping[int, Array]) -> Mapping[int, Array]:
    """The tables of hash-routed layers whose routing follows from a token: none where routing is recorded."""
    return tables if replay is None else {}
