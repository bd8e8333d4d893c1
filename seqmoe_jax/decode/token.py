"""The choice of the next token, and what it means for its sequence."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from seqmoe_jax.decode.state import EXHAUSTED, NON_FINITE, RUNNING, STOPPED, Sequences
from seqmoe_jax.sampling import SamplingParams, greedy, mask_padding, sample


def next_token(
    logits: Float[Array, "B V"],
    sequences: Sequences,
    sampling: SamplingParams,
    eos_token_ids: Int[Array, "B N"],
    position: Int[Array, " B"],
    *,
    greedily: bool,
    vocab: int,
) -> tuple[Sequences, Int32[Array, " B"], Int32[Array, " B"]]:
    """Samples the tokens that will stand at `position`, all below `vocab`, and says what becomes of their sequences
    (`RUNNING`, `STOPPED`, `EXHAUSTED` or `NON_FINITE`). Sequences that have ended stay as they are."""
    if vocab < logits.shape[-1]:
        logits = mask_padding(logits, vocab)
    picked = greedy(logits) if greedily else sample(logits, sampling, position)
    # The best of them, which any that is no number replaces: `argmax` finds it already, so this costs no launch.
    best = jnp.take_along_axis(logits, greedy(logits)[:, None], axis=-1)[:, 0]
    token = jnp.where(sequences.done, sequences.token, picked)
    remaining = jnp.where(sequences.done, sequences.remaining, sequences.remaining - 1)
    stopped = (token[:, None] == eos_token_ids).any(axis=-1)
    end = jnp.where(stopped, STOPPED, jnp.where(remaining <= 0, EXHAUSTED, RUNNING))
    end = jnp.where(jnp.isfinite(best) | sequences.done, end, NON_FINITE).astype(jnp.int32)
    position = jnp.where(sequences.done, sequences.position, position)
    done = sequences.done | (end != RUNNING)
    return sequences._replace(token=token, position=position, remaining=remaining, done=done), token, end
