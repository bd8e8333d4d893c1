"""The predictor's inputs: routing as one vector per step (paper 5.2), token rows, echoes.

The routing of a step becomes a vector of L*E probabilities: the softmax over the K routed experts of each layer, zero
for the others, layers side by side. Shapes: T steps, L layers, K active of E experts, key = layer * E + expert.

The *echo* of a token is the routing of an earlier step of the same sequence that processed the same token: the step
whose preceding tokens match the longest context, and the latest of these. Routing depends so much on the token that an
echo tells most of what an embedding of the token could, and it also exists for tokens that training never saw.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Integer, UInt8

CONTEXT = 3  # tokens that are compared for an echo: the one processed and the two before it
NO_TOKEN = 0  # embedding row of a step whose token is not known yet
FIRST_ROW = (
    1 + 64
)  # Rows 1 to 64 are shared by tokens that training never saw; the rows from here on have one token each.
NEVER = 255  # steps until a use that does not come within 254 steps


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
    """The K likeliest experts of each layer of a forecast, normalised; the others are zero (Psi in paper 5.2).

    Recursive prediction feeds this back, so that forecasts and observed routing look alike.
    """
    threshold = jax.lax.top_k(probs, active)[0][..., -1:]
    kept = jnp.where(probs >= threshold, probs, 0)
    return kept / jnp.maximum(kept.sum(-1, keepdims=True), 1e-9)


def token_table(tokens: Int[np.ndarray, " T"], vocabulary: int) -> Int[np.ndarray, " vocabulary"]:
    """Embedding row of every token id: its own where `tokens` holds the id, else a shared one."""
    rows = 1 + np.arange(vocabulary, dtype=np.int64) % (FIRST_ROW - 1)
    seen = np.unique(tokens)
    rows[seen] = FIRST_ROW + np.arange(len(seen))
    return rows.astype(np.int32)


def echo_steps(tokens: Int[np.ndarray, " T"], offsets: Int[np.ndarray, " N1"], window: int) -> Int[np.ndarray, " T"]:
    """For each step the step that its echo comes from, at most `window` steps back; -1 where there is none."""
    found = np.full(len(tokens), -1, np.int64)
    for start, end in itertools.pairwise(offsets):
        latest: list[dict[tuple[int, ...], int]] = [{} for _ in range(CONTEXT)]
        sequence = tokens[start:end].tolist()
        for step in range(len(sequence)):
            # Places before the first token hold -1, as in the memory of the decode step.
            context = tuple(sequence[step - back] if step >= back else -1 for back in range(CONTEXT))
            for length in range(CONTEXT, 0, -1):
                source = latest[length - 1].get(context[:length], -1)
                if source >= 0 and step - source <= window:
                    found[start + step] = start + source
                    break
            for length in range(CONTEXT):
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
