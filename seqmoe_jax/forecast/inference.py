"""The predictor at inference: pure functions over a plain pytree, for use inside the jitted decode step (paper 5.3).

`weights` is what `Predictor.weights()` gives or `store.load` reads. `init_state` makes `state`: the recurrent states of
the blocks, the tokens just processed, and the memory that echoes are looked up in (`echoes`).
Shapes: B sequences, T steps, L layers, E experts, keys = L * E.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from seqmoe_jax.forecast import echoes
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.features import NO_TOKEN, activate
from seqmoe_jax.forecast.heads import Inputs, embed, heads, membership
from seqmoe_jax.forecast.heads import refine as refined_logits
from seqmoe_jax.forecast.mamba2 import block_chunk, block_step
from seqmoe_jax.forecast.mamba2 import init_state as block_state

Pytree = dict[str, Any]


def init_state(config: PredictorConfig, batch: int, dtype: Any = jnp.float32) -> Pytree:
    """The state of `batch` sequences that have run no step yet."""
    state: Pytree = {
        "blocks": [block_state(config.block, batch, dtype) for _ in range(config.blocks)],
        "hidden": jnp.zeros((batch, config.d_model), dtype),
        "logits": jnp.zeros((batch, config.layers, config.experts), jnp.float32),
    }
    if config.uses_echo:
        state |= echoes.empty_memory(config, batch)
    return state


def step(
    config: PredictorConfig, weights: Pytree, state: Pytree, features: Float[Array, "B keys"], tokens: Int[Array, " B"]
) -> tuple[Pytree, Float[Array, "B L E"], Float[Array, "B L E"]]:
    """Takes in the routing of the step just run and the tokens just sampled (-1: unknown); forecasts the coming step.

    Returns the new state, the probabilities of being routed in the coming step (they sum to about K per layer), and
    the retention scores, which are in [0, 1].
    """
    dtype = weights["in_proj"].dtype
    new = dict(state)
    rows = echo = None
    if config.uses_token:
        rows = token_rows(weights, tokens)
    if config.uses_echo:
        new, echo = echoes.remember(config, state, features, tokens)
    x = embed(config, weights, Inputs(features, rows, echo), dtype)
    x, new["blocks"] = trunk(config, weights, x, state["blocks"])
    logits, retention = heads(config, weights, x)
    new["hidden"], new["logits"] = x, logits
    return new, jax.nn.sigmoid(membership(weights, logits)), jax.nn.sigmoid(retention)


def refine(
    config: PredictorConfig, weights: Pytree, state: Pytree, known: Float[Array, "B keys"]
) -> Float[Array, "B L E"]:
    """Probabilities of the running step, forecast anew from the routing of its first layers.

    `known` is that routing, zero in the layers still to come. Rows of the result that belong to layers already run
    mean nothing. The state does not change, because the next `step` reads the routing of the whole step.
    """
    hidden = state["hidden"].astype(weights["in_proj"].dtype)
    logits = refined_logits(config, weights, hidden, state["logits"], known)
    return jax.nn.sigmoid(membership(weights, logits, refined=True))


def rollout(config: PredictorConfig, weights: Pytree, state: Pytree, steps: int) -> Float[Array, "B C L E"]:
    """Probabilities of the coming C = `steps` steps, each fed back as the next one's input; `state` stays as it was.

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

    # The loop is unrolled because a loop inside a CUDA graph costs more than the few kernels of a step.
    first = state["logits"]
    _, later = jax.lax.scan(advance, (state["blocks"], first), None, length=steps - 1, unroll=True)
    logits = jnp.concatenate([first[:, None], jnp.moveaxis(later, 0, 1)], axis=1)
    return jax.nn.sigmoid(membership(weights, logits))


def token_rows(weights: Pytree, tokens: Int[Array, "*B"]) -> Int[Array, "*B"]:
    """Embedding rows of token ids; ids outside the vocabulary, such as -1, have none."""
    table = weights["token_table"]
    inside = (tokens >= 0) & (tokens < table.shape[0])
    return jnp.where(inside, table[jnp.where(inside, tokens, 0)].astype(jnp.int32), NO_TOKEN)


def trunk(
    config: PredictorConfig, weights: Pytree, x: Float[Array, "B D"], blocks: list[Pytree]
) -> tuple[Float[Array, "B D"], list[Pytree]]:
    """One step of all Mamba2 blocks, from their recurrent states `blocks`."""
    new = []
    for block, old in zip(weights["blocks"], blocks, strict=True):
        x, state = block_step(block, x, old, config.block)
        new.append(state)
    return x, new


def prefill(
    config: PredictorConfig,
    weights: Pytree,
    state: Pytree,
    features: Float[Array, "B T keys"],
    tokens: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> Pytree:
    """The state after T calls of `step`, of which a sequence takes only the `valid` ones, which come first.

    It runs in chunked form (paper 5.3, "Prefill"). Position t reads the routing of the token before it and token t.
    """
    dtype = weights["in_proj"].dtype
    count = valid.sum(1, dtype=jnp.int32)
    rows = jnp.arange(features.shape[0])
    new = dict(state)
    token = echo = None
    if config.uses_token:
        token = token_rows(weights, tokens)
    if config.uses_echo:
        new, echo = echoes.remember_all(config, state, features, tokens, count)
    x = embed(config, weights, Inputs(features, token, echo), dtype)
    new["blocks"] = []
    for block, old in zip(weights["blocks"], state["blocks"], strict=True):
        x, last = block_chunk(block, x, old, config.block, valid)
        new["blocks"].append(last)
    some = count > 0
    hidden = x[rows, jnp.maximum(count - 1, 0)]
    new["hidden"] = jnp.where(some[:, None], hidden, state["hidden"]).astype(state["hidden"].dtype)
    new["logits"] = jnp.where(some[:, None, None], heads(config, weights, hidden)[0], state["logits"])
    # The convolution's new tail has the dtype of the activations; the state keeps its own.
    after: Pytree = jax.tree.map(lambda value, old: value.astype(old.dtype), new, state)
    return after
