"""Sequences join and leave those that are decoded together: the programs that move their device state.

What a sequence has on the device is a pytree of arrays with the lanes in front. Nothing is computed here, so it does
not matter to a sequence in which lane it is, or who is beside it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from seqmoe_jax.decode.state import Sequences

Tree = TypeVar("Tree")  # a pytree of arrays `[B, ...]`


@partial(jax.jit, donate_argnums=0)
def put_lane(lanes: Tree, one: Tree, lane: Int[Array, ""]) -> Tree:
    """The lanes with a single sequence in one of them."""
    return jax.tree.map(lambda old, new: lax.dynamic_update_slice_in_dim(old, new, lane, 0), lanes, one)


@jax.jit
def pick_lanes(lanes: Tree, index: Int[Array, " n"]) -> Tree:
    """As many lanes as `index` has, with what was in these; -1: whatever there is, for a lane that is to be empty."""
    return jax.tree.map(lambda leaf: jnp.take(leaf, jnp.maximum(index, 0), axis=0, mode="clip"), lanes)


@jax.jit
def pick_sequences(sequences: Sequences, predictor: Any, index: Int[Array, " n"]) -> tuple[Sequences, Any]:
    """`pick_lanes` of sequences, without the states of their mixers, and of the predictor's state. Empty lanes are
    done."""
    sequences, predictor = pick_lanes((sequences, predictor), index)
    return sequences._replace(done=sequences.done | (index < 0)), predictor


@partial(jax.jit, donate_argnums=0)
def end_lanes(done: Bool[Array, " B"], ended: Bool[Array, " B"]) -> Bool[Array, " B"]:
    """`done` of sequences, some of which nobody wants any more."""
    return done | ended
