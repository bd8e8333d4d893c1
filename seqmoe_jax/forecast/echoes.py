"""The memory that echoes are looked up in, inside the jitted decode step (see `features` for what an echo is).

It is a ring of the last `config.echo` steps of every sequence: the tokens of each step, its age and its routing.
Shapes: B sequences, T steps, M = `config.echo` entries, C = `CONTEXT` tokens, the latest first; keys = L * E.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.features import CONTEXT

Pytree = dict[str, Any]


def empty_memory(config: PredictorConfig, batch: int) -> Pytree:
    """The memory of `batch` sequences that have run no step yet."""
    return {
        "step": jnp.zeros(batch, jnp.int32),
        "recent": jnp.full((batch, CONTEXT), -1, jnp.int32),
        "memory_tokens": jnp.full((batch, config.echo, CONTEXT), -1, jnp.int32),
        "memory_age": jnp.full((batch, config.echo), -1, jnp.int32),
        "memory": jnp.zeros((batch, config.echo, config.keys), jnp.bfloat16),
    }


def remember(
    config: PredictorConfig, state: Pytree, features: Float[Array, "B keys"], tokens: Int[Array, " B"]
) -> tuple[Pytree, Float[Array, "B keys"]]:
    """Files the step just run under its tokens, then looks up the echo of the coming token.

    The entry of the longest matching context wins, then the latest one.
    """
    rows = jnp.arange(features.shape[0])
    slot = state["step"] % config.echo
    # A sequence that has not processed a token yet has nothing to file.
    age = jnp.where(state["recent"][:, 0] >= 0, state["step"], -1)
    new = dict(state)
    new["memory_tokens"] = state["memory_tokens"].at[rows, slot].set(state["recent"], unique_indices=True)
    new["memory_age"] = state["memory_age"].at[rows, slot].set(age, unique_indices=True)
    new["memory"] = state["memory"].at[rows, slot].set(features.astype(jnp.bfloat16), unique_indices=True)
    new["recent"] = jnp.concatenate([tokens[:, None].astype(jnp.int32), state["recent"][:, :-1]], axis=1)
    new["step"] = state["step"] + 1

    rank = _rank(new["memory_tokens"], new["memory_age"], new["recent"])
    best = jnp.argmax(rank, axis=1)
    found = rank[rows, best] >= 0
    return new, jnp.where(found[:, None], new["memory"][rows, best], 0).astype(features.dtype)


def remember_all(
    config: PredictorConfig,
    state: Pytree,
    features: Float[Array, "B T keys"],
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
) -> tuple[Pytree, Float[Array, "B T keys"]]:
    """`remember` for T steps at once, of which each sequence takes the first `count`.

    The old memory in order of age, followed by the T steps themselves, is one long memory. Each step looks its echo up
    in the part of it that its own memory would hold.
    """
    batch, steps = tokens.shape
    rows = jnp.arange(batch)
    # The oldest comes first: the next step would take the place of entry 0.
    order = (state["step"][:, None] + jnp.arange(config.echo)) % config.echo
    tokens = tokens.astype(jnp.int32)
    history = jnp.concatenate([state["recent"][:, ::-1], tokens], axis=1)  # ..., before, last, 0, 1, ...
    recent = jnp.stack([history[:, CONTEXT - d : CONTEXT - d + steps] for d in range(CONTEXT)], axis=-1)  # [B, T, C]
    filed = jnp.concatenate([state["recent"][:, None], recent[:, :-1]], axis=1)
    age = jnp.where(filed[..., 0] >= 0, state["step"][:, None] + jnp.arange(steps), -1)
    all_tokens = jnp.concatenate([state["memory_tokens"][rows[:, None], order], filed], axis=1)
    all_ages = jnp.concatenate([state["memory_age"][rows[:, None], order], age], axis=1)
    all_features = jnp.concatenate([state["memory"][rows[:, None], order], features.astype(jnp.bfloat16)], axis=1)

    def echo_of(step: Int[Array, ""]) -> Array:
        # Entries step + 1 ... step + echo are what the memory holds after this step was filed.
        filed_under = jax.lax.dynamic_slice_in_dim(all_tokens, step + 1, config.echo, 1)
        ages = jax.lax.dynamic_slice_in_dim(all_ages, step + 1, config.echo, 1)
        rank = _rank(filed_under, ages, recent[:, step])
        best = jnp.argmax(rank, axis=1)
        return jnp.where(rank[rows, best] >= 0, step + 1 + best, -1)

    source = jnp.moveaxis(jax.lax.map(echo_of, jnp.arange(steps), batch_size=min(steps, 64)), 0, 1)  # [B, T]
    echo = all_features[rows[:, None], jnp.maximum(source, 0)]
    echo = jnp.where((source >= 0)[..., None], echo, 0).astype(features.dtype)

    # The last `echo` entries of each sequence, each in its place of the ring.
    at = jnp.arange(config.echo)
    position = count[:, None] + (at - (state["step"] + count)[:, None]) % config.echo
    new = dict(state)
    new["memory_tokens"] = all_tokens[rows[:, None], position]
    new["memory_age"] = all_ages[rows[:, None], position]
    new["memory"] = all_features[rows[:, None], position]
    new["recent"] = jnp.where((count > 0)[:, None], recent[rows, jnp.maximum(count - 1, 0)], state["recent"])
    new["step"] = state["step"] + count
    return new, echo


def _rank(tokens: Int[Array, "B M C"], age: Int[Array, "B M"], recent: Int[Array, "B C"]) -> Int[Array, "B M"]:
    """How good an echo of `recent` each entry of the memory is: by length of context, then by age; -1 if it is none."""
    same = (tokens == recent[:, None]).astype(jnp.int32)
    length = same[..., 0]
    for depth in range(1, CONTEXT):
        length = length + same[..., : depth + 1].prod(-1)
    usable = (age >= 0) & (length > 0) & (recent[:, :1] >= 0)
    return jnp.where(usable, length * (1 << 28) + age, -1)
