"""The programs that read prompts (paper 8.4): small ones, each compiled once per length and kind of layer.

Unlike decoding, prefill is not one graph: lengths vary, and a layer takes long enough to hide its dispatch. In order:

    begin_prompt       one sequence and the predictor's state, both of them empty
    begin_chunk        the embeddings of each chunk of a pass; then, layer by layer:
        route_chunk    chunk by chunk: mixer, router
        place_chunk    chunk by chunk: what the experts read of it, into that of the pass
        apply_experts  the whole pass: what the prompts teach the policy, then the experts, loaded where they miss
        sum_experts    the whole pass: the sum over each token's experts
        take_chunk     chunk by chunk: its part of these sums
        finish_chunk   chunk by chunk: they are added to the stream
    end_chunk          chunk by chunk: the hidden state of a prompt's last token; the predictor reads the chunk
    first_token        of one sequence: output head and sampling
    begin_decoding     of one sequence: its first decode step is forecast, beside the sequences that decode already

A sequence's chunks and its first token are computed as if it were alone, by programs that know nothing of the pass;
only the experts see a pass as a whole, and they compute every row by itself. So tokens do not depend on who else is
there. A pass of one chunk needs neither `place_chunk` nor `take_chunk`. All residencies run the same programs around
the experts: XLA may round differently in programs that are cut elsewhere. `reader` runs them.

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
from seqmoe_jax.prefill.replay import RecordedPart, choice
from seqmoe_jax.programs import owned
from seqmoe_jax.sampling import SamplingParams


class Reading(NamedTuple):
    """What reading a prompt leaves beside the sequence."""

    last: Float[Array, "1 *S H"]  # hidden state of the prompt's last token
    routing: Float32[Array, "1 keys"] | None  # of the last token read so far, which the predictor reads next
    predictor: dict[str, Any] | None  # its state


class ChunkTokens(NamedTuple):
    """The tokens of a chunk."""

    ids: Int32[Array, " T"]
    positions: Int32[Array, " T"]
    valid: Bool[Array, " T"]
    recorded: RecordedPart | None = None  # forced routing (`replay`)


class Stream(NamedTuple):
    """What travels from layer to layer of a chunk; donated to every program that writes it."""

    x: Float[Array, "T *S H"]
    ids: Int32[Array, "L T K"]  # -1 for padding and for layers still to come
    weights: Float32[Array, "L T K"]


class Routed(NamedTuple):
    """What the experts of a layer read, of a chunk or of a pass."""

    normed: Float[Array, "P H"]
    ids: Int32[Array, "P K"]  # -1 for padding
    weights: Float32[Array, "P K"]


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

    `remaining`: tokens that may follow the prompt.
    """
    spec, (sequence, state) = beginning.spec, beginning.states(1)
    routing = None if state is None else jnp.zeros((1, spec.num_keys), jnp.float32)
    reading = Reading(jnp.zeros((1, *spec.token_shape), beginning.dtype), routing, state)
    return sequence._replace(position=length, remaining=remaining), reading


@partial(jax.jit, static_argnames="spec")
def begin_chunk(table: Float[Array, "V H"], ids: Int[Array, " T"], *, spec: ModelSpec) -> Stream:
    """Embeds a chunk."""
    routes = (len(spec.moe_layers), len(ids), spec.moe.top_k)
    return Stream(
        x=block.embed(ids[None], table, spec)[0],
        ids=jnp.full(routes, -1, jnp.int32),
        weights=jnp.zeros(routes, jnp.float32),
    )


@partial(jax.jit, static_argnames=("length", "hidden", "active", "dtype"))
def begin_pass(*, length: int, hidden: int, active: int, dtype: np.dtype) -> Routed:
    """Room for the chunks of a pass; only padding so far."""
    return Routed(
        normed=jnp.zeros((length, hidden), dtype),
        ids=jnp.full((length, active), -1, jnp.int32),
        weights=jnp.zeros((length, active), jnp.float32),
    )


@partial(jax.jit, static_argnames=("layer", "implementation"), donate_argnums=(0, 1))
def route_chunk(
    stream: Stream,
    state: State,
    weights: LayerWeights,
    tokens: ChunkTokens,
    moe_index: Int[Array, ""],
    *,
    layer: LayerSpec,
    implementation: Implementation,
) -> tuple[Stream, State, Routed | None]:
    """Runs a layer's mixer and router over a chunk; a layer that has no experts runs whole."""
    entered, positions, valid = stream.x[None], tokens.positions[None], tokens.valid[None]
    x, state = block.mix(entered, state, positions, valid, weights, layer, implementation)
    if not isinstance(layer.mlp, MoESpec):
        return stream._replace(x=block.dense(x, weights, layer)[0]), state, None
    assert isinstance(weights.mlp, MoEWeights)
    normed, _ = block.moe_input(x, weights, layer)
    ids, shares = choice(*layer.mlp.router(normed, tokens.ids, weights.mlp.router), tokens.recorded, moe_index)
    ids = mask_inactive(ids, tokens.valid).astype(jnp.int32)
    stream = Stream(
        x=x[0],
        ids=lax.dynamic_update_index_in_dim(stream.ids, ids, moe_index, 0),
        weights=lax.dynamic_update_index_in_dim(stream.weights, shares, moe_index, 0),
    )
    return stream, state, Routed(normed, ids, shares)


@partial(jax.jit, donate_argnums=0)
def place_chunk(whole: Routed, chunk: Routed, at: Int[Array, ""]) -> Routed:
    """The pass with a chunk in it, at token `at`."""
    return jax.tree.map(lambda old, part: lax.dynamic_update_slice_in_dim(old, part, at, 0), whole, chunk)


@partial(jax.jit, static_argnames=("config", "rule"), donate_argnums=(0, 1, 2))
def apply_experts(
    cache: SlotCache,
    forecast: Forecast,
    counts: ExpertCounts,
    routed: Routed,
    pool: Shaped[Array, "E n"],
    moe_index: Int[Array, ""],
    *,
    config: CacheConfig,
    rule: PromptRule,
) -> tuple[SlotCache, Forecast, ExpertCounts, Float32[Array, "N M H"], Int32[Array, "P K"]]:
    """Runs a layer's experts over a pass, after the policy has seen their use. See `moe_prefill` for the results."""
    tokens_per_expert = counts.tokens_per_expert[moe_index] + count_tokens(routed.ids, config.experts)
    tokens = tokens_per_expert.sum() // routed.ids.shape[-1]  # each of them is routed to K experts
    cache, forecast = observe_prompt(cache, forecast, tokens_per_expert, tokens, moe_index, config, rule)
    out, place, cache, new = moe_prefill(routed.normed, routed.ids, cache, pool, moe_index, config)
    counts = ExpertCounts(counts.totals + new, counts.tokens_per_expert.at[moe_index].set(tokens_per_expert))
    return cache, forecast, counts, out, place


sum_experts = owned(jax.jit(combine))


@partial(jax.jit, static_argnames="width")
def take_chunk(summed: Float32[Array, "P H"], at: Int[Array, ""], *, width: int) -> Float32[Array, "T H"]:
    """The sums of the chunk at token `at`."""
    return lax.dynamic_slice_in_dim(summed, at, width, 0)


@partial(jax.jit, static_argnames="layer", donate_argnums=0)
def finish_chunk(stream: Stream, summed: Float32[Array, "T H"], weights: LayerWeights, *, layer: LayerSpec) -> Stream:
    """Adds the sums over the experts of a chunk's tokens, and the shared expert, to the stream."""
    x = stream.x[None]
    normed, mixing = block.moe_input(x, weights, layer)
    return stream._replace(x=block.moe_output(x, normed, mixing, summed, weights, layer)[0])


@partial(jax.jit, static_argnames="spec")
def score_chunk(stream: Stream, weights: ModelWeights, *, spec: ModelSpec) -> Float32[Array, "T V"]:
    """The logits after every token of a chunk."""
    return block.logits_of(stream.x, weights, spec)


@partial(jax.jit, static_argnames="config", donate_argnums=0)
def end_chunk(
    reading: Reading,
    stream: Stream,
    tokens: ChunkTokens,
    length: Int[Array, " 1"],
    predictor: dict[str, Any] | None,
    *,
    config: PredictorConfig | None,
) -> Reading:
    """Keeps the hidden state of the prompt's last token, if it is in this chunk; the predictor reads the chunk
    (paper 5.3), from the routing of the token before it on."""
    width = len(tokens.ids)
    index = length[0] - 1 - tokens.positions[0]
    row = stream.x[jnp.clip(index, 0, width - 1)][None]
    last = jnp.where((index >= 0) & (index < width), row, reading.last)
    if config is None or predictor is None:
        return reading._replace(last=last)
    assert reading.predictor is not None
    assert reading.routing is not None
    known = forecaster.features(stream.ids, stream.weights, layers=config.layers, experts=config.experts)
    routing = jnp.concatenate([reading.routing, known])
    features = routing[None, :-1].astype(predictor["in_proj"].dtype)
    valid = tokens.valid[None]
    state = plain.prefill(config, predictor, reading.predictor, features, tokens.ids[None], valid)
    return Reading(last, routing[valid.sum()][None], state)


@partial(jax.jit, static_argnames="config", donate_argnums=0)
def first_token(
    sequence: Sequences,
    last: Float[Array, "1 *S H"],
    weights: ModelWeights,
    sampling: SamplingParams,
    eos_token_ids: Int[Array, "B N"],
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


@partial(jax.jit, static_argnames="config", donate_argnums=0)
def begin_decoding(
    offload: Offload,
    sequence: Sequences,
    end: Int[Array, " 1"],
    routing: Float32[Array, "1 keys"] | None,
    totals: Int[Array, " 3"],
    done: Bool[Array, " B"] | None,
    predictor: dict[str, Any] | None,
    replay: Replay | None,
    *,
    config: StepConfig,
) -> tuple[Offload, StepOutput]:
    """Forecasts the first step of a sequence, which comes without the states of its mixers, beside others.

    `offload.predictor` is its state of the predictor. `done`: which of the others have ended; None: there are none.
    """
    others = jnp.int32(0) if done is None else (~done).sum(dtype=jnp.int32)
    coming = Coming(forced_tokens(replay, offload.steps, sequence.token), ~sequence.done)
    offload = config.policy.after_prompt(offload, routing, coming, others, PolicyInputs(predictor))
    return offload, StepOutput.pack(sequence.token, end, totals)
