"""The programs that read prompts (paper 8.4): small ones, each compiled once per prompt length and kind of layer.

Unlike decoding, prefill is not one graph: lengths vary, a layer takes long enough to hide its dispatch, and experts
arrive from the host between programs. A layer of a *pass* (as much of the prompts as goes through the model at once) is

    route_chunk     chunk by chunk: mixer, router
    begin_experts   the whole pass: what the prompt teaches the policy; experts that are in slots or loaded on demand
    add_experts     the whole pass, for each group of experts that has been streamed
    finish_chunk    chunk by chunk: the sum over each token's experts, back into the stream

All residencies run the same programs around the experts: XLA may round differently in programs that are cut elsewhere.
`prompts` runs them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Shaped

from pallas_kernels.grouped_moe import combine
from seqmoe_jax.decode.policy import Inputs
from seqmoe_jax.decode.replay import Replay, forced_tokens
from seqmoe_jax.decode.state import Offload, Sequences, StepOutput
from seqmoe_jax.decode.step import StepConfig
from seqmoe_jax.decode.token import next_token
from seqmoe_jax.experts.cache import CacheConfig, SlotCache
from seqmoe_jax.experts.policy import PromptRule
from seqmoe_jax.forecast import forecaster
from seqmoe_jax.forecast import inference as plain
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.forecaster import Forecast
from seqmoe_jax.models import block
from seqmoe_jax.models.layers import mask_inactive
from seqmoe_jax.models.mixers import State
from seqmoe_jax.models.spec import LayerSpec, ModelSpec, MoESpec
from seqmoe_jax.models.weights import LayerWeights, ModelWeights, MoEWeights
from seqmoe_jax.prefill.experts import Blocks, Tally, learn, resident_experts, staged_experts, tokens_of_experts
from seqmoe_jax.sampling import SamplingParams

CHUNK = 1024  # most tokens (over all sequences) that pass a mixer at once: bounds its workspace
PASS_CHUNKS = 4  # chunks that pass a layer before the next one begins: an expert moves once for all of them
SMALLEST_BUCKET = 16


class Tokens(NamedTuple):
    """A pass: P positions of every sequence."""

    ids: Int32[Array, "B P"]
    positions: Int32[Array, "B P"]
    valid: Bool[Array, "B P"]
    replayed: Int32[Array, "B P"] | None = None  # row of the forced routing, where there is one


class Stream(NamedTuple):
    """What travels from layer to layer in a pass; donated to every program that writes it."""

    x: Float[Array, "B P *S H"]
    normed: Float[Array, "B P H"]  # what the experts of the running layer read
    ids: Int32[Array, "L B P K"]  # -1 for padding and for layers still to come
    weights: Float32[Array, "L B P K"]


def bucket(length: int) -> int:
    """The padded length of a chunk: the next power of two, so few lengths are ever compiled."""
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())


def chunk_length(batch: int) -> int:
    """Longest chunk of each of `batch` sequences."""
    return max(SMALLEST_BUCKET, CHUNK // batch)


def chunks_of(length: int, chunk: int) -> list[tuple[int, int]]:
    """(where it starts, padded width) of the chunks of a pass of `length` positions."""
    return [(start, bucket(min(chunk, length - start))) for start in range(0, length, chunk)]


def block_rows(tokens: int) -> int:
    """Rows of a block of tokens that share an expert: enough to feed matrix units, few enough to waste little."""
    return 64 if tokens >= 512 else 16


@partial(jax.jit, static_argnames=("spec", "dtype"))
def begin_pass(
    table: Float[Array, "V H"],
    ids: Int[Array, "B P"],
    valid: Bool[Array, "B P"],
    start: Int[Array, ""],
    lengths: Int[Array, " B"],
    steps: Int[Array, ""],
    replay: Replay | None,
    *,
    spec: ModelSpec,
    dtype: Any,
) -> tuple[Stream, Tokens]:
    """Embeddings of a pass that starts at position `start`. Forced routing is that of the steps before `steps`."""
    batch, length = ids.shape
    positions = jnp.broadcast_to(start + jnp.arange(length, dtype=jnp.int32), ids.shape)
    routes = (len(spec.moe_layers), batch, length, spec.moe.top_k)
    stream = Stream(
        x=block.embed(ids, table, spec),
        normed=jnp.zeros((batch, length, spec.hidden), dtype),
        ids=jnp.full(routes, -1, jnp.int32),
        weights=jnp.zeros(routes, jnp.float32),
    )
    replayed = None if replay is None else (steps - lengths[:, None] + positions) % replay.tokens.shape[0]
    return stream, Tokens(ids, positions, valid, replayed)


def _part(array: Array, start: Array, width: int) -> Array:
    return lax.dynamic_slice_in_dim(array, start, width, 1)


def _put(array: Array, part: Array, start: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), start, 1)


@partial(jax.jit, static_argnames=("layer", "width"), donate_argnums=(0, 1))
def route_chunk(
    stream: Stream,
    state: State,
    weights: LayerWeights,
    tokens: Tokens,
    start: Int[Array, ""],
    moe_index: Int[Array, ""],
    replay: Replay | None,
    *,
    layer: LayerSpec,
    width: int,
) -> tuple[Stream, State]:
    """The mixer over a chunk, then the router; all of a layer that has no experts."""
    now = jax.tree.map(lambda array: _part(array, start, width), tokens)
    x, state = block.mix(_part(stream.x, start, width), state, now.positions, now.valid, weights, layer)
    if not isinstance(layer.mlp, MoESpec):
        return stream._replace(x=_put(stream.x, block.dense(x, weights, layer), start)), state
    assert isinstance(weights.mlp, MoEWeights)
    normed, _ = block.moe_input(x, weights, layer)
    ids, shares = layer.mlp.router(normed, now.ids.reshape(-1), weights.mlp.router)
    if replay is not None:
        # Depends on the model's own routing, so that the work of the router is done and timed.
        rows = now.replayed.reshape(-1)
        ids = jnp.where(ids >= 0, replay.ids[rows, moe_index], ids)
        shares = replay.weights[rows, moe_index]
    ids = mask_inactive(ids, now.valid.reshape(-1))
    batch = x.shape[0]
    at = (moe_index, 0, start, 0)
    return Stream(
        x=_put(stream.x, x, start),
        normed=_put(stream.normed, normed.reshape(batch, width, -1), start),
        ids=lax.dynamic_update_slice(stream.ids, ids.astype(jnp.int32).reshape(1, batch, width, -1), at),
        weights=lax.dynamic_update_slice(stream.weights, shares.reshape(1, batch, width, -1), at),
    ), state


@partial(jax.jit, static_argnames=("config", "rule"), donate_argnums=(0, 1, 2))
def begin_experts(
    cache: SlotCache,
    forecast: Forecast,
    tally: Tally,
    normed: Float[Array, "B P H"],
    ids: Int[Array, "L B P K"],
    sent: Bool[Array, " E"],
    tokens: Int[Array, ""],
    pool: Shaped[Array, "E n"],
    moe_index: Int[Array, ""],
    *,
    config: CacheConfig,
    rule: PromptRule,
) -> tuple[SlotCache, Forecast, Tally, Float32[Array, "N M H"], Blocks]:
    """A layer's experts but those `sent`. `tokens`: of the prompts, this pass included; the tally is of as many."""
    x = normed.reshape(-1, normed.shape[-1])
    mine = ids[moe_index].reshape(x.shape[0], -1)
    tokens_of = tally.tokens_of[moe_index] + tokens_of_experts(mine, config.experts)
    cache, forecast = learn(cache, forecast, tokens_of, tokens, moe_index, config, rule)
    out, blocks, cache, counts = resident_experts(
        x, mine, sent, cache, pool, moe_index, config, rows=block_rows(x.shape[0])
    )
    tally = Tally(tally.counts + counts, tally.tokens_of.at[moe_index].set(tokens_of))
    return cache, forecast, tally, out, blocks


@partial(jax.jit, static_argnames="config", donate_argnums=(0, 1))
def add_experts(
    cache: SlotCache,
    out: Float32[Array, "N M H"],
    blocks: Blocks,
    normed: Float[Array, "B P H"],
    staged: Shaped[Array, "G n"],
    experts: Int[Array, " G"],
    tokens_of: Int[Array, "L E"],
    moe_index: Int[Array, ""],
    *,
    config: CacheConfig,
) -> tuple[SlotCache, Float32[Array, "N M H"], Int32[Array, ""]]:
    """A group of streamed experts. The last result, how many were given a slot, is there when the group is done."""
    x = normed.reshape(-1, normed.shape[-1])
    out, cache, taken = staged_experts(out, x, blocks, staged, experts, cache, tokens_of[moe_index], moe_index, config)
    return cache, out, taken


@partial(jax.jit, static_argnames=("layer", "width"), donate_argnums=0)
def finish_chunk(
    stream: Stream,
    out: Float32[Array, "N M H"],
    place: Int[Array, "BP K"],
    weights: LayerWeights,
    start: Int[Array, ""],
    moe_index: Int[Array, ""],
    *,
    layer: LayerSpec,
    width: int,
) -> Stream:
    """A chunk's sums over its tokens' experts, and the shared expert, into the stream."""
    batch, length, active = stream.ids.shape[1:]
    x = _part(stream.x, start, width)
    normed, mixing = block.moe_input(x, weights, layer)
    chunk_place = _part(place.reshape(batch, length, active), start, width).reshape(-1, active)
    shares = _part(stream.weights[moe_index], start, width).reshape(-1, active)
    x = block.moe_output(x, normed, mixing, combine(out, chunk_place, shares), weights, layer)
    return stream._replace(x=_put(stream.x, x, start))


@partial(jax.jit, donate_argnums=0)
def keep_last(
    last: Float[Array, "B *S H"], x: Float[Array, "B P *S H"], start: Int[Array, ""], lengths: Int[Array, " B"]
) -> Float[Array, "B *S H"]:
    """The hidden state of each prompt's last token, taken from the pass that holds it."""
    index = lengths - 1 - start
    inside = (index >= 0) & (index < x.shape[1])
    rows = x[jnp.arange(x.shape[0]), jnp.clip(index, 0, x.shape[1] - 1)]
    return jnp.where(inside.reshape(-1, *(1,) * (last.ndim - 1)), rows, last)


@partial(jax.jit, static_argnames=("config", "width"), donate_argnums=(0, 1))
def warm_predictor(
    state: dict[str, Any],
    pending: Float32[Array, "B keys"],
    predictor: dict[str, Any],
    ids: Int[Array, "L B P K"],
    weights: Float32[Array, "L B P K"],
    tokens: Tokens,
    start: Int[Array, ""],
    replay: Replay | None,
    *,
    config: PredictorConfig,
    width: int,
) -> tuple[dict[str, Any], Float32[Array, "B keys"]]:
    """The predictor reads a chunk of a pass (paper 5.3). `pending`: the routing of the token before the chunk.

    Returns the state, and the routing of each sequence's last token so far: the next call reads it, with what follows.
    """
    chunk_ids = lax.dynamic_slice_in_dim(ids, start, width, 2)
    shares = lax.dynamic_slice_in_dim(weights, start, width, 2)
    now = jax.tree.map(lambda array: _part(array, start, width), tokens)
    layers, batch, _, active = chunk_ids.shape
    flat = (layers, batch * width, active)
    known = forecaster.features(
        chunk_ids.reshape(flat), shares.reshape(flat), layers=config.layers, experts=config.experts
    ).reshape(batch, width, -1)
    routing = jnp.concatenate([pending[:, None], known], axis=1)
    read = now.ids if replay is None else replay.tokens[now.replayed]
    dtype = predictor["in_proj"].dtype
    state = plain.prefill(config, predictor, state, routing[:, :-1].astype(dtype), read, now.valid)
    return state, routing[jnp.arange(batch), now.valid.sum(1)]


@partial(jax.jit, static_argnames="config", donate_argnums=(0, 1))
def first_token(
    sequences: Sequences,
    offload: Offload,
    last: Float[Array, "B *S H"],
    weights: ModelWeights,
    sampling: SamplingParams,
    end_tokens: Int[Array, " N"],
    counts: Int[Array, " 3"],
    pending: Float32[Array, "B keys"] | None,
    predictor: dict[str, Any] | None,
    replay: Replay | None,
    *,
    config: StepConfig,
) -> tuple[Sequences, Offload, StepOutput]:
    """Samples the token after each prompt and forecasts the step that processes it, from the `pending` routing.

    `sequences.position` holds the prompts' lengths.
    """
    logits = block.logits_of(last, weights, config.spec)
    sequences, token, end = next_token(
        logits, sequences, sampling, end_tokens, sequences.position, greedily=config.greedy, vocab=config.vocab
    )
    coming = forced_tokens(replay, offload.steps, token)
    offload = config.policy.after_prompt(offload, pending, coming, ~sequences.done, Inputs(predictor))
    return sequences, offload, StepOutput.pack(token, end, counts)
