"""What the predictor reads: routing as one vector per step (paper 5.2), token rows, echoes.

A step's routing becomes a vector of L*E probabilities: softmax over the K routed experts of each layer, zero for
the others, layers side by side. Shapes: T steps, L layers, K active of E experts, key = layer * E + expert.

An *echo* is the routing of the latest earlier step of the same sequence that processed the same token, longest
common context first. Routing depends on the token so much that this tells most of what a token's own embedding
could, and it also works for tokens that training never saw.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Integer, UInt8

CONTEXT = 3  # tokens compared for an echo: the one processed and the two before it
NO_TOKEN = 0  # row of a step whose token is not known yet
FIRST_ROW = 1 + 64  # rows 1..64 are shared by tokens that training never saw
NEVER = 255  # "not used again within 254 steps"


def activation_features(
    ids: Integer[np.ndarray, "T L K"], probs: UInt8[np.ndarray, "T L K"], experts: int
) -> Float32[np.ndarray, "T keys"]:
    """Activation-masked softmax of every step; `probs` is the softmax over the routed experts times 255."""
    steps, layers, _ = ids.shape
    # An expert that was routed with a weight rounded to zero still counts as routed.
    weight = np.maximum(probs.astype(np.float32), 0.5)
    weight /= weight.sum(-1, keepdims=True)
    dense = np.zeros((steps, layers, experts), np.float32)
    np.put_along_axis(dense, ids.astype(np.int64), weight, axis=-1)
    return dense.reshape(steps, layers * experts)


def activate(probs: Float[Array, "*B L E"], active: int) -> Float[Array, "*B L E"]:
    """Psi of paper 5.2 on a forecast: the K likeliest experts of each layer, normalised; the others zero.

    This is what recursive prediction feeds back, so that forecasts and observed routing look alike.
    """
    threshold = jax.lax.top_k(probs, active)[0][..., -1:]
    kept = jnp.where(probs >= threshold, probs, 0)
    return kept / jnp.maximum(kept.sum(-1, keepdims=True), 1e-9)


def token_table(tokens: Int[np.ndarray, " T"], vocabulary: int, least: int = 1) -> Int[np.ndarray, " vocabulary"]:
    """Embedding row of every token id: its own where `tokens` holds it at least `least` times, else a shared one."""
    counts = np.bincount(tokens, minlength=vocabulary)
    rows = 1 + np.arange(vocabulary, dtype=np.int64) % (FIRST_ROW - 1)
    seen = np.flatnonzero(counts >= least)
    rows[seen] = FIRST_ROW + np.arange(len(seen))
    return rows.astype(np.int32)


def echo_steps(
    tokens: Int[np.ndarray, " T"], offsets: Int[np.ndarray, " N1"], window: int, *, longest: int = CONTEXT
) -> Int[np.ndarray, " T"]:
    """For each step the step that its echo comes from, at most `window` steps back; -1 where there is none.

    Contexts of up to `longest` tokens are compared; 1 is the latest occurrence of the token, whatever stood before.
    """
    found = np.full(len(tokens), -1, np.int64)
    for start, end in itertools.pairwise(offsets):
        latest: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]
        sequence = tokens[start:end].tolist()
        for step in range(len(sequence)):
            # Before the first token stands -1, as in the decode step's memory.
            context = tuple(sequence[step - back] if step >= back else -1 for back in range(longest))
            for length in range(longest, 0, -1):
                source = latest[length - 1].get(context[:length], -1)
                if source >= 0 and step - source <= window:
                    found[start + step] = start + source
                    break
            for length in range(longest):
                latest[length][context[: length + 1]] = step
    return found


def steps_until_use(
    active: Bool[np.ndarray, "T keys"], offsets: Sequence[int] | np.ndarray
) -> UInt8[np.ndarray, "T keys"]:
    """Steps from each step to the next one *after it* that uses a key (1 = the very next); `NEVER` where none does."""
    until = np.full(active.shape, NEVER, np.uint8)
    for start, end in itertools.pairwise(offsets):
        ahead = np.full(active.shape[1], NEVER, np.uint8)
        for step in range(end - 2, start - 1, -1):
            ahead = np.where(active[step + 1], np.uint8(1), np.minimum(ahead, NEVER - 1) + np.uint8(1))
            until[step] = ahead
    return until
