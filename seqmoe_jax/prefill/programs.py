"""The programs that read prompts (paper 8.4): small ones, each compiled once per length and kind of layer.

Unlike decoding, prefill is not one graph: lengths vary, and a layer takes long enough to hide its dispatch. In order:

    begin_prompt       one sequence and the predictor's state, both of them empty
    begin_pass         the embeddings of a pass; then, layer by layer:
        route_chunk    chunk by chunk: mixer, router
        apply_experts  the whole pass: what the prompts teach the policy, then the experts, loaded where they miss
        finish_chunk   chunk by chunk: the sum over each token's experts, back into the stream
    end_chunk          chunk by chunk: the hidden state of a prompt's last token; the predictor reads the chunk
    first_token        of one sequence: output head and sampling
    join_states        layer by layer: the sequences' states become those of a batch
    begin_decoding     sequences become a batch, and the first decode step is forecast

A sequence's chunks and its first token are computed as if it were alone; only the experts see a pass as a whole, and
they compute every row by itself. So tokens do not depend on who else is there. All residencies run the same programs
around the experts: XLA may round differently in programs that are cut elsewhere. `reader` runs them.

Shapes: P tokens of a pass, T of a chunk, B sequences.
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
    """What reading a prompt leaves beside the sequence."""

    last: Float[Array, "1 *S H"]  # hidden state of the prompt's last token
    routing: Float32[Array, "1 keys"] | None  # of the last token read so far, which the predictor reads next
    predictor: dict[str, Any] | None  # its state


class PassTokens(NamedTuple):
    """The tokens of a pass, chunk after chunk."""

    ids: Int32[Array, " P"]
    positions: Int32[Array, " P"]
    valid: Bool[Array, " P"]
    recorded: RecordedPass | None = None  # forced routing (`replay`)


class Stream(NamedTuple):
    """What travels from layer to layer in a pass; donated to every program that writes it."""

    x: Float[Array, "P *S H"]
    normed: Float[Array, "P H"]  # what the experts of the running layer read
    ids: Int32[Array, "L P K"]  # -1 for padding and for layers still to come
    weights: Float32[Array, "L P K"]


class Beginning(NamedTuple):
    """What the state of a sequence of which nothing is read yet is made of."""

    spec: ModelSpec
    capacity: int
    dtype: np.dtype
    predictor: PredictorConfig | None
    predictor_dtype: np.dtype | None

    def states(self, batch: int) -> tuple[Sequences, dict[str, Any] | None]:
        """Of `batch` sequences, and of the predictor that reads along, if there is one."""
        sequences = empty_sequences(spec=self.spec, batch=batch, capacity=self.capacity, dtype=self.dtype)
        if self.predictor is None:
            return sequences, None
        return sequences, plain.init_state(self.predictor, batch, self.predictor_dtype)


@partial(jax.jit, static_argnames="beginning")
def begin_prompt(
    length: Int32[Array, " 1"], remaining: Int32[Array, " 1"], *, beginning: Beginning
) -> tuple[Sequences, Reading]:
    """Makes a sequence of which nothing is read yet.

    `remaining`: tokens that may follow the prompt; 0 for the padding of a batch, which is done from the start.
    """
    spec, (sequence, state) = beginning.spec, beginning.states(1)
    routing = None if state is None else jnp.zeros((1, spec.num_keys), jnp.float32)
    reading = Reading(jnp.zeros((1, *spec.token_shape), beginning.dtype), routing, state)
    return sequence._replace(position=length, remaining=remaining, done=remaining == 0), reading


@partial(jax.jit, static_argnames=("spec", "dtype"))
def begin_pass(table: Float[Array, "V H"], ids: Int[Array, " P"], *, spec: ModelSpec, dtype: np.dtype) -> Stream:
    """Embeds a pass."""
    routes = (len(spec.moe_layers), len(ids), spec.moe.top_k)
    return Stream(
        x=block.embed(ids[None], table, spec)[0],
        normed=jnp.zeros((len(ids), spec.hidden), dtype),
        ids=jnp.full(routes, -1, jnp.int32),
        weights=jnp.zeros(routes, jnp.float32),
    )


def _cut(array: Array, at: Int[Array, ""], width: int, axis: int = 0) -> Array:
    return lax.dynamic_slice_in_dim(array, at, width, axis)


def _put(array: Array, part: Array, at: Int[Array, ""]) -> Array:
    return lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), at, 0)


@partial(jax.jit, static_argnames=("layer", "width", "implementation"), donate_argnums=(0, 1))
def route_chunk(
    stream: Stream,
    state: State,
    weights: LayerWeights,
    tokens: PassTokens,
    at: Int[Array, ""],
    moe_index: Int[Array, ""],
    *,
    layer: LayerSpec,
    width: int,
    implementation: Implementation,
) -> tuple[Stream, State]:
    """Runs a layer's mixer and router over the chunk at `at`; a layer that has no experts runs whole."""
    chunk = jax.tree.map(lambda array: _cut(array, at, width), tokens)
    entered, positions, valid = _cut(stream.x, at, width)[None], chunk.positions[None], chunk.valid[None]
    x, state = block.mix(entered, state, positions, valid, weights, layer, implementation)
    if not isinstance(layer.mlp, MoESpec):
        return stream._replace(x=_put(stream.x, block.dense(x, weights, layer)[0], at)), state
    assert isinstance(weights.mlp, MoEWeights)
    normed, _ = block.moe_input(x, weights, layer)
    ids, shares = choice(*layer.mlp.router(normed, chunk.ids, weights.mlp.router), chunk.recorded, moe_index)
    ids = mask_inactive(ids, chunk.valid)
    return Stream(
        x=_put(stream.x, x[0], at),
        normed=_put(stream.normed, normed, at),
        ids=lax.dynamic_update_slice(stream.ids, ids.astype(jnp.int32)[None], (moe_index, at, 0)),
        weights=lax.dynamic_update_slice(stream.weights, shares[None], (moe_index, at, 0)),
    ), state


@partial(jax.jit, static_argnames=("config", "rule"), donate_argnums=(0, 1, 2))
def apply_experts(
    cache: SlotCache,
    forecast: Forecast,
    counts: ExpertCounts,
    normed: Float[Array, "P H"],
    ids: Int[Array, "L P K"],
    pool: Shaped[Array, "E n"],
    moe_index: Int[Array, ""],
    *,
    config: CacheConfig,
    rule: PromptRule,
) -> tuple[SlotCache, Forecast, ExpertCounts, Float32[Array, "N M H"], Int32[Array, "P K"]]:
    """Runs a layer's experts over a pass, after the policy has seen their use. See `moe_prefill` for the results."""
    of_layer = ids[moe_index]
    tokens_per_expert = counts.tokens_per_expert[moe_index] + count_tokens(of_layer, config.experts)
    tokens = tokens_per_expert.sum() // ids.shape[-1]  # each of them is routed to K experts
    cache, forecast = observe_prompt(cache, forecast, tokens_per_expert, tokens, moe_index, config, rule)
    out, place, cache, new = moe_prefill(normed, of_layer, cache, pool, moe_index, config)
    counts = ExpertCounts(counts.totals + new, counts.tokens_per_expert.at[moe_index].set(tokens_per_expert))
    return cache, forecast, counts, out, place


@partial(jax.jit, static_argnames=("layer", "width"), donate_argnums=0)
def finish_chunk(
    stream: Stream,
    out: Float32[Array, "N M H"],
    place: Int[Array, "P K"],
    weights: LayerWeights,
    at: Int[Array, ""],
    moe_index: Int[Array, ""],
    *,
    layer: LayerSpec,
    width: int,
) -> Stream:
    """Adds the sums over the experts of a chunk's tokens, and the shared expert, to the stream."""
    x = _cut(stream.x, at, width)[None]
    normed, mixing = block.moe_input(x, weights, layer)
    routed = combine(out, _cut(place, at, width), _cut(stream.weights[moe_index], at, width))
    return stream._replace(x=_put(stream.x, block.moe_output(x, normed, mixing, routed, weights, layer)[0], at))


@partial(jax.jit, static_argnames=("spec", "width"))
def score_chunk(
    stream: Stream, weights: ModelWeights, at: Int[Array, ""], *, spec: ModelSpec, width: int
) -> Float32[Array, "T V"]:
    """The logits after every token of a chunk."""
    return block.logits_of(_cut(stream.x, at, width), weights, spec)


@partial(jax.jit, static_argnames=("config", "width"), donate_argnums=0)
def end_chunk(
    reading: Reading,
    stream: Stream,
    tokens: PassTokens,
    length: Int[Array, " 1"],
    at: Int[Array, ""],
    predictor: dict[str, Any] | None,
    *,
    config: PredictorConfig | None,
    width: int,
) -> Reading:
    """Keeps the hidden state of the prompt's last token, if it is in this chunk; the predictor reads the chunk
    (paper 5.3), from the routing of the token before it on."""
    index = length[0] - 1 - tokens.positions[at]
    row = stream.x[at + jnp.clip(index, 0, width - 1)][None]
    last = jnp.where((index >= 0) & (index < width), row, reading.last)
    if config is None or predictor is None:
        return reading._replace(last=last)
    assert reading.predictor is not None
    assert reading.routing is not None
    ids, shares = (_cut(array, at, width, 1) for array in (stream.ids, stream.weights))
    valid = _cut(tokens.valid, at, width)[None]
    known = forecaster.features(ids, shares, layers=config.layers, experts=config.experts)
    routing = jnp.concatenate([reading.routing, known])
    features = routing[None, :-1].astype(predictor["in_proj"].dtype)
    state = plain.prefill(config, predictor, reading.predictor, features, _cut(tokens.ids, at, width)[None], valid)
    return Reading(last, routing[valid.sum()][None], state)


@partial(jax.jit, static_argnames="config", donate_argnums=0)
def first_token(
    sequence: Sequences,
    last: Float[Array, "1 *S H"],
    weights: ModelWeights,
    sampling: SamplingParams,
    eos_token_ids: Int[Array, " N"],
    *,
    config: StepConfig,
) -> tuple[Sequences, Int32[Array, " 1"]]:
    """Samples the token after a prompt. Also says what became of the sequence (`decode.state.RUNNING`, ...).

    `sequence.position` holds the prompt's length.
    """
    logits = block.logits_of(last, weights, config.spec)
    sequence, _, end = next_token(
        logits, sequence, sampling, eos_token_ids, sequence.position, greedily=config.greedy, vocab=config.vocab
    )
    return sequence, end


@jax.jit
def join_states(states: tuple[State, ...]) -> State:
    """What a layer's mixer keeps of single sequences, as that of a batch."""
    return jax.tree.map(lambda *each: jnp.concatenate(each), *states)


@partial(jax.jit, static_argnames="config", donate_argnums=0)
def begin_decoding(
    offload: Offload,
    sequences: tuple[Sequences, ...],
    predictor_states: tuple[Any, ...],
    ends: tuple[Int[Array, " 1"], ...],
    routing: tuple[Float32[Array, "1 keys"] | None, ...],
    totals: Int[Array, " 3"],
    predictor: dict[str, Any] | None,
    replay: Replay | None,
    *,
    config: StepConfig,
) -> tuple[Sequences, Offload, StepOutput]:
    """Makes a batch of sequences, which come without the states of their mixers, and forecasts its first step."""
    batch = join_states(sequences)
    offload = offload._replace(predictor=join_states(predictor_states))
    coming = Coming(forced_tokens(replay, offload.steps, batch.token), ~batch.done)
    offload = config.policy.after_prompt(offload, join_states(routing), coming, PolicyInputs(predictor))
    return batch, offload, StepOutput.pack(batch.token, jnp.concatenate(ends), totals)
