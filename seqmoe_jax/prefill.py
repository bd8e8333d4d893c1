"""Prompts through the model, layer by layer (paper 8.4): one small program per prompt length, used for all layers.

Unlike decoding, prefill is not one graph: lengths vary, a layer takes long enough to hide its dispatch, and one
program for all layers keeps compilation short.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Shaped

from seqmoe_jax.decode import Sequences, StepConfig, StepOutput, choose
from seqmoe_jax.experts.cache import CacheConfig, SlotCache, moe_prefill
from seqmoe_jax.models import block
from seqmoe_jax.models.layers import mask_inactive
from seqmoe_jax.models.mixers import State
from seqmoe_jax.models.spec import LayerSpec, MoESpec
from seqmoe_jax.models.weights import LayerWeights, ModelWeights, MoEWeights
from seqmoe_jax.sampling import SamplingParams

CHUNK = 1024  # most tokens (over all sequences) that pass a layer at once: bounds prefill's workspace
SMALLEST_BUCKET = 16


class Routing(NamedTuple):
    """Where a MoE layer sent the tokens of a chunk; ids are -1 for padding. Small, and only read to record traces."""

    ids: Int[Array, "n K"]
    weights: Float32[Array, "n K"]


def bucket(length: int) -> int:
    """The padded length of a chunk: the next power of two, so few lengths are ever compiled."""
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())


def chunk_length(batch: int) -> int:
    """Longest chunk of each of `batch` sequences."""
    return max(SMALLEST_BUCKET, CHUNK // batch)


def block_rows(tokens: int) -> int:
    """Rows of a block of tokens that share an expert: enough to feed matrix units, few enough to waste little."""
    return 64 if tokens >= 512 else 16


@partial(jax.jit, static_argnames="spec")
def embed_chunk(
    table: Float[Array, "V H"], tokens: Int[Array, "B T"], start: Int[Array, ""], *, spec: ModelSpec
) -> tuple[Float[Array, "B T *S H"], Int[Array, "B T"]]:
    """Embeddings of a chunk and the positions of its tokens."""
    positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return block.embed(tokens, table, spec), jnp.broadcast_to(positions, tokens.shape)


@partial(jax.jit, static_argnames=("layer", "config"), donate_argnums=(0, 1, 2))
def layer_chunk(
    x: Float[Array, "B T *S H"],
    state: State,
    cache: SlotCache,
    weights: LayerWeights,
    pool: Shaped[Array, "E n"] | None,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    moe_index: Int[Array, ""],
    *,
    layer: LayerSpec,
    config: CacheConfig,
) -> tuple[Float[Array, "B T *S H"], State, SlotCache, Int32[Array, " 3"], Int32[Array, " E"], Routing | None]:
    """One layer over one chunk. Returns the counts (routed, hits, misses), the tokens each expert got, the routing."""
    x, state = block.mix(x, state, positions, valid, weights, layer)
    if not isinstance(layer.mlp, MoESpec):
        nothing = jnp.zeros(3, jnp.int32), jnp.zeros(config.experts, jnp.int32)
        return block.dense(x, weights, layer), state, cache, *nothing, None
    assert isinstance(weights.mlp, MoEWeights)
    assert pool is not None
    normed, mixing = block.moe_input(x, weights, layer)
    ids, expert_weights = layer.mlp.router(normed, tokens.reshape(-1), weights.mlp.router)
    ids = mask_inactive(ids, valid.reshape(-1))
    y, cache, counts, tokens_of = moe_prefill(
        normed, ids, expert_weights, cache, pool, moe_index, config, rows=block_rows(normed.shape[0])
    )
    x = block.moe_output(x, normed, mixing, y, weights, layer)
    return x, state, cache, counts, tokens_of, Routing(ids, expert_weights)


@jax.jit
def keep_last(
    last: Float[Array, "B *S H"], x: Float[Array, "B T *S H"], start: Int[Array, ""], lengths: Int[Array, " B"]
) -> Float[Array, "B *S H"]:
    """The hidden state of each prompt's last token, taken from the chunk that holds it."""
    index = lengths - 1 - start
    inside = (index >= 0) & (index < x.shape[1])
    rows = x[jnp.arange(x.shape[0]), jnp.clip(index, 0, x.shape[1] - 1)]
    return jnp.where(inside.reshape(-1, *(1,) * (last.ndim - 1)), rows, last)


@partial(jax.jit, static_argnames="config", donate_argnums=0)
def first_token(
    sequences: Sequences,
    last: Float[Array, "B *S H"],
    weights: ModelWeights,
    sampling: SamplingParams,
    end_tokens: Int[Array, " N"],
    counts: Int[Array, " 3"],
    *,
    config: StepConfig,
) -> tuple[Sequences, StepOutput]:
    """Samples the token after each prompt. `sequences.position` holds the prompts' lengths."""
    logits = block.logits_of(last, weights, config.spec)
    sequences, token, end = choose(logits, sequences, sampling, end_tokens, sequences.position, config)
    return sequences, StepOutput.pack(token, end, counts)
