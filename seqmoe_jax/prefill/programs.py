"""The programs that read prompts (paper 8.4): small ones, each compiled once per length and kind of layer.

Unlike decoding, prefill is not one graph: lengths vary, and a layer takes long enough to hide its dispatch. In order:

    begin_prompts      sequences, counts and the predictor's state, all of them empty
    begin_pass         the embeddings of a pass; then, layer by layer:
        route_chunk    chunk by chunk: mixer, router
        apply_experts  the whole pass: what the prompt teaches the policy, then the experts, loaded where they miss
        finish_chunk   chunk by chunk: the sum over each token's experts, back into the stream
    end_pass           the hidden state of every prompt's last token; the predictor reads the pass
    first_token        output head and sampling, and the forecast of the first decode step

All residencies run the same programs around the experts: XLA may round differently in programs that are cut elsewhere.
`reader` runs them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Shaped

from pallas_kernels.backend import Implementation
from pallas_kernels.grouped_moe import combine
from seqmoe_jax.decode.policy import Coming, PolicyInputs
from seqmoe_jax.decode.replay import Replay, forced_tokens
from seqmoe_jax.decode.state import Offload, Sequences, StepOutput, empty_sequences
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
from seqmoe_jax.prefill.experts import ExpertCounts, count_tokens, moe_prefill, observe_prompt
from seqmoe_jax.prefill.replay import RecordedPass, choice
from seqmoe_jax.sampling import SamplingParams


class Reading(NamedTuple):
    """What reading prompts gathers, beside the sequences and the offload state."""

    last: Float[Array, "B *S H"]  # hidden state of each prompt's last token
    counts: ExpertCounts
    routing: Float32[Array, "B keys"] | None  # of the last token read so far, which the predictor reads next


class PassTokens(NamedTuple):
    """The tokens of a pass: P positions of every sequence."""

    ids: Int32[Array, "B P"]
    positions: Int32[Array, "B P"]
    valid: Bool[Array, "B P"]
    recorded: RecordedPass | None = None  # forced routing (`replay`)


class Stream(NamedTuple):
    """What travels from layer to layer in a pass; donated to every program that writes it."""

    x: Float[Array, "B P *S H"]
    normed: Float[Array, "B P H"]  # what the experts of the running layer read
    ids: Int32[Array, "L B P K"]  # -1 for padding and for layers still to come
    weights: Float32[Array, "L B P K"]


@partial(jax.jit, static_argnames=("spec", "capacity", "dtype", "predictor", "predictor_dtype"))
def begin_prompts(
    lengths: Int32[Array, " B"],
    remaining: Int32[Array, " B"],
    *,
    spec: ModelSpec,
    capacity: int,
    dtype: np.dtype,
    predictor: PredictorConfig | None,
    predictor_dtype: np.dtype | None,
) -> tuple[Sequences, Reading, dict[str, Any] | None]:
    """Makes sequences of which nothing is read yet, and the state of a predictor that reads along, if there is one.

    `remaining`: tokens that may follow each prompt; 0 for the padding of the batch, which is done from the start.
    """
    batch = lengths.shape[0]
    sequences = empty_sequences(spec=spec, batch=batch, capacity=capacity, dtype=dtype)
    counts = ExpertCounts(jnp.zeros(3, jnp.int32), jnp.zeros((len(spec.moe_layers), spec.moe.num_experts), jnp.int32))
    reading = Reading(last=jnp.zeros((batch, *spec.token_shape), dtype), counts=counts, routing=None)
    state = None
    if predictor is not None:
        reading = reading._replace(routing=jnp.zeros((batch, spec.num_keys), jnp.float32))
        state = plain.init_state(predictor, batch, predictor_dtype)
    return sequences._replace(position=lengths, remaining=remaining, done=remaining == 0), reading, state


@partial(jax.jit, static_argnames=("spec", "dtype"))
def begin_pass(
    table: Float[Array, "V H"],
    ids: Int[Array, "B P"],
    valid: Bool[Array, "B P"],
    start: Int[Array, ""],
    *,
    spec: ModelSpec,
    dtype: np.dtype,
) -> tuple[Stream, PassTokens]:
    """Embeds a pass that starts at position `start`."""
    batch, length = ids.shape
    routes = (len(spec.moe_layers), batch, length, spec.moe.top_k)
    stream = Stream(
        x=block.embed(ids, table, spec),
        normed=jnp.zeros((batch, length, spec.hidden), dtype),
        ids=jnp.full(routes, -1, jnp.int32),
        weights=jnp.zeros(routes, jnp.float32),
    )
    return stream, PassTokens(ids, jnp.broadcast_to(start + jnp.arange(length, dtype=jnp.int32), ids.shape), valid)


def _cut(array: Array, start: Int[Array, ""], width: int) -> Array:
    return lax.dynamic_slice_in_dim(array, start, width, 1)


def _put(array: Array, part: Array, start: Int[Array, ""]) -> Array:
    return lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), start, 1)


@partial(jax.jit, static_argnames=("layer", "width", "implementation"), donate_argnums=(0, 1))
def route_chunk(
    stream: Stream,
    state: State,
    weights: LayerWeights,
    tokens: PassTokens,
    start: Int[Array, ""],
    moe_index: Int[Array, ""],
    *,
    layer: LayerSpec,
    width: int,
    implementation: Implementation,
) -> tuple[Stream, State]:
    """Runs a layer's mixer and router over a chunk; a layer that has no experts runs whole."""
    chunk = jax.tree.map(lambda array: _cut(array, start, width), tokens)
    entered = _cut(stream.x, start, width)
    x, state = block.mix(entered, state, chunk.positions, chunk.valid, weights, layer, implementation)
    if not isinstance(layer.mlp, MoESpec):
        return stream._replace(x=_put(stream.x, block.dense(x, weights, layer), start)), state
    assert isinstance(weights.mlp, MoEWeights)
    normed, _ = block.moe_input(x, weights, layer)
    chosen = layer.mlp.router(normed, chunk.ids.reshape(-1), weights.mlp.router)
    ids, shares = choice(*chosen, chunk.recorded, moe_index)
    ids = mask_inactive(ids, chunk.valid.reshape(-1))
    batch = x.shape[0]
    at = (moe_index, 0, start, 0)
    return Stream(
        x=_put(stream.x, x, start),
        normed=_put(stream.normed, normed.reshape(batch, width, -1), start),
        ids=lax.dynamic_update_slice(stream.ids, ids.astype(jnp.int32).reshape(1, batch, width, -1), at),
        weights=lax.dynamic_update_slice(stream.weights, shares.reshape(1, batch, width, -1), at),
    ), state


@partial(jax.jit, static_argnames=("config", "rule"), donate_argnums=(0, 1, 2))
def apply_experts(
    cache: SlotCache,
    forecast: Forecast,
    counts: ExpertCounts,
    normed: Float[Array, "B P H"],
    ids: Int[Array, "L B P K"],
    pool: Shaped[Array, "E n"],
    moe_index: Int[Array, ""],
    *,
    config: CacheConfig,
    rule: PromptRule,
) -> tuple[SlotCache, Forecast, ExpertCounts, Float32[Array, "N M H"], Int32[Array, "BP K"]]:
    """Runs a layer's experts over a pass, after the policy has seen their use. See `moe_prefill` for the results."""
    x = normed.reshape(-1, normed.shape[-1])
    of_layer = ids[moe_index].reshape(x.shape[0], -1)
    tokens_per_expert = counts.tokens_per_expert[moe_index] + count_tokens(of_layer, config.experts)
    tokens = tokens_per_expert.sum() // ids.shape[-1]  # each of them is routed to K experts
    cache, forecast = observe_prompt(cache, forecast, tokens_per_expert, tokens, moe_index, config, rule)
    out, place, cache, new = moe_prefill(x, of_layer, cache, pool, moe_index, config)
    counts = ExpertCounts(counts.totals + new, counts.tokens_per_expert.at[moe_index].set(tokens_per_expert))
    return cache, forecast, counts, out, place


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
    """Adds the sums over the experts of a chunk's tokens, and the shared expert, to the stream."""
    batch, length, active = stream.ids.shape[1:]
    x = _cut(stream.x, start, width)
    normed, mixing = block.moe_input(x, weights, layer)
    chunk_place = _cut(place.reshape(batch, length, active), start, width).reshape(-1, active)
    shares = _cut(stream.weights[moe_index], start, width).reshape(-1, active)
    x = block.moe_output(x, normed, mixing, combine(out, chunk_place, shares), weights, layer)
    return stream._replace(x=_put(stream.x, x, start))


@partial(jax.jit, static_argnames=("config", "width"), donate_argnums=(0, 1, 2))
def end_pass(
    last: Float[Array, "B *S H"],
    routing: Float32[Array, "B keys"] | None,
    state: dict[str, Any] | None,
    stream: Stream,
    tokens: PassTokens,
    lengths: Int[Array, " B"],
    chunks: Int[Array, ""],
    predictor: dict[str, Any] | None,
    *,
    config: PredictorConfig | None,
    width: int,
) -> tuple[Float[Array, "B *S H"], Float32[Array, "B keys"] | None, dict[str, Any] | None]:
    """Keeps the hidden states of last tokens that are in this pass; the predictor reads the pass's `chunks`,
    of `width` each.

    Returns `last` and `routing` (see `Reading`) and the predictor's state.
    """
    batch, length = tokens.ids.shape
    index = lengths - 1 - tokens.positions[:, 0]
    rows = stream.x[jnp.arange(batch), jnp.clip(index, 0, length - 1)]
    inside = (index >= 0) & (index < length)
    last = jnp.where(inside.reshape(-1, *(1,) * (last.ndim - 1)), rows, last)
    if config is None or predictor is None:
        return last, routing, state

    def read_chunk(n: Int[Array, ""], carry: tuple[dict[str, Any], Array]) -> tuple[dict[str, Any], Array]:
        state, routing = carry
        return _read_chunk(predictor, state, routing, stream, tokens, n * width, config, width)

    state, routing = lax.fori_loop(0, chunks, read_chunk, (state, routing))
    return last, routing, state


def _read_chunk(
    predictor: dict[str, Any],
    state: dict[str, Any],
    before: Float32[Array, "B keys"],
    stream: Stream,
    tokens: PassTokens,
    start: Int[Array, ""],
    config: PredictorConfig,
    width: int,
) -> tuple[dict[str, Any], Float32[Array, "B keys"]]:
    """The predictor reads a chunk (paper 5.3), from the routing of the token `before` it on.

    Returns the state, and the routing of each sequence's last token so far.
    """
    ids, shares = (lax.dynamic_slice_in_dim(array, start, width, 2) for array in (stream.ids, stream.weights))
    chunk_ids, valid = _cut(tokens.ids, start, width), _cut(tokens.valid, start, width)
    layers, batch, _, active = ids.shape
    flat = (layers, batch * width, active)
    known = forecaster.features(ids.reshape(flat), shares.reshape(flat), layers=config.layers, experts=config.experts)
    routing = jnp.concatenate([before[:, None], known.reshape(batch, width, -1)], axis=1)
    features = routing[:, :-1].astype(predictor["in_proj"].dtype)
    state = plain.prefill(config, predictor, state, features, chunk_ids, valid)
    return state, routing[jnp.arange(batch), valid.sum(1)]


@partial(jax.jit, static_argnames="config", donate_argnums=(0, 1))
def first_token(
    sequences: Sequences,
    offload: Offload,
    reading: Reading,
    weights: ModelWeights,
    sampling: SamplingParams,
    eos_token_ids: Int[Array, " N"],
    predictor: dict[str, Any] | None,
    replay: Replay | None,
    *,
    config: StepConfig,
) -> tuple[Sequences, Offload, StepOutput]:
    """Samples the token after each prompt and forecasts the step that processes it.

    `sequences.position` holds the prompts' lengths.
    """
    logits = block.logits_of(reading.last, weights, config.spec)
    sequences, token, end = next_token(
        logits, sequences, sampling, eos_token_ids, sequences.position, greedily=config.greedy, vocab=config.vocab
    )
    coming = Coming(forced_tokens(replay, offload.steps, token), ~sequences.done)
    offload = config.policy.after_prompt(offload, reading.routing, coming, PolicyInputs(predictor))
    return sequences, offload, StepOutput.pack(token, end, reading.counts.totals)
