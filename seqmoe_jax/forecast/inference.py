"""The predictor at inference: pure functions over a plain pytree, for use inside the jitted decode step (paper 5.3).

`weights` is what `Predictor.weights()` gives or `store.load` reads. `init_state` makes `state`: the recurrent states of
the blocks, the tokens just processed, and the memory that echoes are looked up in (see `features`).
Shapes: B sequences, T steps, L layers, E experts, keys = L * E.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.features import CONTEXT, NO_TOKEN, activate
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
        state |= {
            "step": jnp.zeros(batch, jnp.int32),
            "recent": jnp.full((batch, CONTEXT), -1, jnp.int32),
            "memory_tokens": jnp.full((batch, config.echo, CONTEXT), -1, jnp.int32),
            "memory_age": jnp.full((batch, config.echo), -1, jnp.int32),
            "memory": jnp.zeros((batch, config.echo, config.keys), jnp.bfloat16),
        }
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
        new, echo = _remember(config, state, features, tokens)
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
        new, echo = _remember_all(config, state, features, tokens, count)
    x = embed(config, weights, Inputs(features, token, echo), dtype)
    new["blocks"] = []
    for block, old in zip(weights["blocks"], state["blocks"], strict=True):
        x, after = block_chunk(block, x, old, config.block, valid)
        new["blocks"].append(after)
    some = count > 0
    hidden = x[rows, jnp.maximum(count - 1, 0)]
    new["hidden"] = jnp.where(some[:, None], hidden, state["hidden"]).astype(state["hidden"].dtype)
    new["logits"] = jnp.where(some[:, None, None], heads(config, weights, hidden)[0], state["logits"])
    # The convolution's new tail has the dtype of the activations; the state keeps its own.
    return jax.tree.map(lambda value, old: value.astype(old.dtype), new, state)


def _remember(config: PredictorConfig, state: Pytree, features: Array, tokens: Array) -> tuple[Pytree, Array]:
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


def _remember_all(
    config: PredictorConfig, state: Pytree, features: Array, tokens: Array, count: Int[Array, " B"]
) -> tuple[Pytree, Array]:
    """`_remember` for T steps at once.

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
