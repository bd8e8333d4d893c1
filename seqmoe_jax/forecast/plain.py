"""The predictor at inference: pure functions over a plain pytree, for use inside the jitted decode step (paper 5.3).

`weights` is what `Predictor.weights()` gives or `store.load` reads; `state` is what `init_state` makes: the blocks'
recurrent states, the tokens just processed, and the memory that echoes are looked up in. B sequences, L layers,
E experts, R retention scores.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.features import CONTEXT, NO_TOKEN, activate
from seqmoe_jax.forecast.mamba2 import block_step
from seqmoe_jax.forecast.mamba2 import init_state as block_state
from seqmoe_jax.forecast.predictor import Inputs, embed, heads, membership
from seqmoe_jax.forecast.predictor import refine as refined_logits

Pytree = dict[str, Any]


def init_state(config: PredictorConfig, batch: int, dtype: Any = jnp.float32) -> Pytree:
    """The state of `batch` sequences of which nothing was seen."""
    state: Pytree = {
        "blocks": [block_state(config.block, batch, dtype) for _ in range(config.blocks)],
        "hidden": jnp.zeros((batch, config.width), dtype),
        "logits": jnp.zeros((batch, config.layers, config.experts), jnp.float32),
    }
    if config.uses_echo:
        state |= {
            "step": jnp.zeros((), jnp.int32),
            "recent": jnp.full((batch, CONTEXT), -1, jnp.int32),
            "memory_tokens": jnp.full((batch, config.echo, CONTEXT), -1, jnp.int32),
            "memory_age": jnp.full((batch, config.echo), -1, jnp.int32),
            "memory": jnp.zeros((batch, config.echo, config.keys), jnp.bfloat16),
        }
    return state


def step(
    config: PredictorConfig, weights: Pytree, state: Pytree, features: Float[Array, "B keys"], tokens: Int[Array, " B"]
) -> tuple[Pytree, Float[Array, "B L E"], Float[Array, "B R L E"]]:
    """Takes in the routing of the step just run and the tokens just sampled (-1: unknown); forecasts the coming step.

    Returns the new state, the probabilities of being routed in the coming step (they sum to about K per layer), and
    the retention scores in [0, 1].
    """
    dtype = weights["in_proj"].dtype
    new = dict(state)
    rows = echo = None
    if config.uses_token:
        rows = token_rows(weights, tokens)
    if config.uses_echo:
        new, echo = _remember(config, state, features, tokens)
    x = embed(config, weights, Inputs(features, rows, echo), dtype)
    x, new["blocks"] = trunk(config, weights, x, state["blocks"])
    logits, retention = heads(config, weights, x)
    new["hidden"], new["logits"] = x, logits
    return new, jax.nn.sigmoid(membership(weights, logits)), jax.nn.sigmoid(retention)


def one_step(
    config: PredictorConfig, weights: Pytree, state: Pytree, features: Float[Array, "B keys"], tokens: Int[Array, " B"]
) -> tuple[Pytree, Float[Array, "L E"], Float[Array, "L E"]]:
    """`step` as the runtime wants it: means over the sequences (paper 6.1, 7.1), the first retention score alone."""
    state, following, retention = step(config, weights, state, features, tokens)
    return state, following.mean(0), retention[:, 0].mean(0)


def refine(
    config: PredictorConfig, weights: Pytree, state: Pytree, known: Float[Array, "B keys"]
) -> Float[Array, "B L E"]:
    """Probabilities of the running step, forecast anew from the routing of its first layers.

    `known` is zero in the layers to come; rows of the result below the trigger layer mean nothing. The state does
    not change: the next `step` reads the whole step's routing.
    """
    hidden = state["hidden"].astype(weights["in_proj"].dtype)
    logits = refined_logits(config, weights, hidden, state["logits"], known)
    return jax.nn.sigmoid(membership(weights, logits, refined=True))


def rollout(config: PredictorConfig, weights: Pytree, state: Pytree, steps: int) -> Float[Array, "B C L E"]:
    """Probabilities of the coming `steps` steps, each fed back as the next one's input; `state` stays as it was.

    Tokens beyond the coming step are unknown, and unknown tokens have no echo.
    """
    dtype = weights["in_proj"].dtype
    batch = state["logits"].shape[0]

    def advance(carry: tuple[Any, Array], _: None) -> tuple[tuple[Any, Array], Array]:
        blocks, logits = carry
        features = activate(jax.nn.softmax(logits, axis=-1), config.active).reshape(batch, config.keys)
        rows = jnp.full(batch, NO_TOKEN, jnp.int32) if config.uses_token else None
        x = embed(config, weights, Inputs(features, rows, None), dtype)
        x, blocks = trunk(config, weights, x, blocks)
        logits = heads(config, weights, x)[0]
        return (blocks, logits), logits

    # Unrolled: a loop inside a CUDA graph costs more than the few kernels of a step.
    first = state["logits"]
    _, later = jax.lax.scan(advance, (state["blocks"], first), None, length=steps - 1, unroll=True)
    logits = jnp.concatenate([first[:, None], jnp.moveaxis(later, 0, 1)], axis=1)
    return jax.nn.sigmoid(membership(weights, logits))


def token_rows(weights: Pytree, tokens: Int[Array, "*B"]) -> Int[Array, "*B"]:
    """Embedding rows of token ids; ids outside the vocabulary, such as -1, have none."""
    table = weights["token_table"]
    inside = (tokens >= 0) & (tokens < table.shape[0])
    return jnp.where(inside, table[jnp.where(inside, tokens, 0)].astype(jnp.int32), NO_TOKEN)


def trunk(config: PredictorConfig, weights: Pytree, x: Array, blocks: list[Pytree]) -> tuple[Array, list[Pytree]]:
    new = []
    for block, old in zip(weights["blocks"], blocks, strict=True):
        x, state = block_step(block, x, old, config.block)
        new.append(state)
    return x, new


def _remember(config: PredictorConfig, state: Pytree, features: Array, tokens: Array) -> tuple[Pytree, Array]:
    """Files the step just run under its tokens, then looks the coming token up: longest context first, then latest."""
    batch = features.shape[0]
    slot = state["step"] % config.echo
    # A sequence that has not processed a token yet has nothing to file.
    age = jnp.where(state["recent"][:, 0] >= 0, state["step"], -1)
    new = dict(state)
    new["memory_tokens"] = state["memory_tokens"].at[:, slot].set(state["recent"])
    new["memory_age"] = state["memory_age"].at[:, slot].set(age)
    new["memory"] = state["memory"].at[:, slot].set(features.astype(jnp.bfloat16))
    new["recent"] = jnp.concatenate([tokens[:, None].astype(jnp.int32), state["recent"][:, :-1]], axis=1)
    new["step"] = state["step"] + 1

    same = (new["memory_tokens"] == new["recent"][:, None]).astype(jnp.int32)
    length = same[..., 0]
    for depth in range(1, CONTEXT):
        length = length + same[..., : depth + 1].prod(-1)
    usable = (new["memory_age"] >= 0) & (length > 0) & (tokens[:, None] >= 0)
    rank = jnp.where(usable, length * (1 << 28) + new["memory_age"], -1)
    best = jnp.argmax(rank, axis=1)
    rows = jnp.arange(batch)
    found = rank[rows, best] >= 0
    return new, jnp.where(found[:, None], new["memory"][rows, best], 0).astype(features.dtype)
