"""One decode step for all sequences: a single jitted computation (design section 4).

Attention, routing, cache management, miss loading, experts, forecast and sampling run in one XLA program whose state
is donated, in the role that CUDA graphs have in the paper. The host only dispatches it and reads small outputs late.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Shaped

from seqmoe_jax.experts.cache import CacheConfig, SlotCache, all_hits, moe_decode, rescore
from seqmoe_jax.forecast import history
from seqmoe_jax.models import block, fused
from seqmoe_jax.models.mixers import State
from seqmoe_jax.models.spec import ModelSpec, MoESpec
from seqmoe_jax.models.weights import ModelWeights
from seqmoe_jax.sampling import SamplingParams, greedy, mask_padding, sample

RUNNING, STOPPED, EXHAUSTED = range(3)  # what a step says of a sequence: goes on, end token, length reached


class Sequences(NamedTuple):
    """Device state of the sequences being generated; donated to every step."""

    states: tuple[State, ...]  # of the layers' mixers
    token: Int32[Array, " B"]  # sampled last, processed next
    position: Int32[Array, " B"]  # where that token will stand
    remaining: Int32[Array, " B"]  # tokens that may still be sampled
    done: Bool[Array, " B"]


@partial(jax.jit, static_argnames=("spec", "batch", "capacity", "dtype"))
def empty_sequences(*, spec: ModelSpec, batch: int, capacity: int, dtype: np.dtype) -> Sequences:
    """Room for `capacity` positions of every sequence; nothing in it."""
    states = tuple(layer.mixer.init_state(batch, capacity, dtype) for layer in spec.layers)
    flat = jnp.zeros(batch, jnp.int32)
    return Sequences(states, flat, flat, flat, jnp.zeros(batch, bool))


class Offload(NamedTuple):
    """Device state of the offloading that outlives a request; donated to every step."""

    cache: SlotCache
    retention: Float32[Array, " keys"]


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Static shape of the compiled programs."""

    spec: ModelSpec
    cache: CacheConfig
    forecast: bool  # policy seqmoe: scores follow the forecast
    greedy: bool
    vocab: int  # of the tokenizer; the output head may have more rows, which must never be drawn
    kernels: fused.DecodeKernels = fused.PLAIN  # beside the experts'


class StepOutput(NamedTuple):
    """What the host reads of a step, one small array: tokens [B], ends [B], counts (routed, hits, misses)."""

    packed: Int32[Array, " 2B+3"]

    @classmethod
    def pack(cls, token: Int[Array, " B"], end: Int[Array, " B"], counts: Int[Array, " 3"]) -> StepOutput:
        return cls(jnp.concatenate([token, end, counts]).astype(jnp.int32))


def choose(
    logits: Float[Array, "B V"],
    sequences: Sequences,
    sampling: SamplingParams,
    end_tokens: Int[Array, " N"],
    position: Int[Array, " B"],
    config: StepConfig,
) -> tuple[Sequences, Int32[Array, " B"], Int32[Array, " B"]]:
    """Samples the tokens that will stand at `position` and says which sequences they end; ended ones stay put."""
    if config.vocab < config.spec.vocab:
        logits = mask_padding(logits, config.vocab)
    picked = greedy(logits) if config.greedy else sample(logits, sampling, position)
    token = jnp.where(sequences.done, sequences.token, picked)
    remaining = jnp.where(sequences.done, sequences.remaining, sequences.remaining - 1)
    stopped = (token[:, None] == end_tokens).any(axis=-1)
    end = jnp.where(stopped, STOPPED, jnp.where(remaining <= 0, EXHAUSTED, RUNNING)).astype(jnp.int32)
    position = jnp.where(sequences.done, sequences.position, position)
    done = sequences.done | (end != RUNNING)
    return sequences._replace(token=token, position=position, remaining=remaining, done=done), token, end


def forward(
    sequences: Sequences,
    offload: Offload,
    weights: ModelWeights,
    pools: tuple[Shaped[Array, "E n"], ...],
    *,
    config: StepConfig,
) -> tuple[Float32[Array, "B V"], Sequences, Offload, Int32[Array, " 3"]]:
    """One token of every sequence through all layers. Returns logits, states, and the counts (routed, hits, misses)."""
    spec, cache = config.spec, offload.cache
    if config.forecast:
        # What a newcomer is worth follows from the retention. Kept in the state it would have to be copied: it is
        # read in every layer and replaced at the end.
        cache = cache._replace(key_score=history.scores(offload.retention))
    positions, active = sequences.position[:, None], ~sequences.done
    x: Array | fused.Pending = block.embed(sequences.token[:, None], weights.embed, spec)
    states, routing = list(sequences.states), list[Int[Array, "B K"]]()
    counts: list[Int32[Array, " 3"]] = []
    for index, (layer, w) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        with jax.named_scope(f"layer{index}/mixer"):
            x, states[index] = fused.mix(x, states[index], positions, active, w, layer, config.kernels)
        if not isinstance(layer.mlp, MoESpec):
            x = block.dense(x, w, layer)
        else:
            with jax.named_scope(f"layer{index}/moe"):
                normed, mixing, ids, expert_weights = fused.route(x, sequences.token, active, w, layer, config.kernels)
                pool = pools[len(routing)]
                y, cache, new = moe_decode(normed, ids, expert_weights, cache, pool, len(routing), config.cache)
                routing.append(ids)
                counts.append(new)
                x = fused.moe_output(x, normed, mixing, y, w, layer, config.kernels)
        # Without this XLA recomputes sums of earlier layers inside later fusions, and compiling takes time that
        # is exponential in the number of layers (ten layers at batch 4 for a GPU: over 280 s, against 18 s).
        x = jax.lax.optimization_barrier(x)
    retention = offload.retention
    if config.forecast:
        with jax.named_scope("forecast"):
            retention = history.observe(retention, jnp.stack(routing), config.cache.experts)
            cache = rescore(cache, history.scores(retention))._replace(key_score=offload.cache.key_score)
    # At once for all layers: a few small kernels instead of a few per layer.
    total = jnp.stack(counts).sum(axis=0) if config.cache.managed else all_hits(jnp.stack(routing), config.cache)
    with jax.named_scope("head"):
        logits = fused.logits_of(fused.settled(x)[:, 0], weights, spec, config.kernels)
    return logits, sequences._replace(states=tuple(states)), Offload(cache, retention), total


def step(
    sequences: Sequences,
    offload: Offload,
    weights: ModelWeights,
    pools: tuple[Shaped[Array, "E n"], ...],
    sampling: SamplingParams,
    end_tokens: Int[Array, " N"],
    *,
    config: StepConfig,
) -> tuple[Sequences, Offload, StepOutput]:
    """Processes one token of every sequence and samples the next one."""
    logits, sequences, offload, counts = forward(sequences, offload, weights, pools, config=config)
    with jax.named_scope("sample"):
        sequences, token, end = choose(logits, sequences, sampling, end_tokens, sequences.position + 1, config)
    return sequences, offload, StepOutput.pack(token, end, counts)


jitted_step = partial(jax.jit, static_argnames="config", donate_argnums=(0, 1))(step)
