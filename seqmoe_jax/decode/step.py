"""One decode step for all sequences: a single jitted computation (design section 4).

Attention, routing, cache management, miss loading, experts, forecast and sampling run in one XLA program whose state
is donated, in the role that CUDA graphs have in the paper. The host only dispatches it and reads small outputs late.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Shaped

from seqmoe_jax.decode.landing import land, send_plan
from seqmoe_jax.decode.layer import Routed, StepTokens, dense_layer, moe_layer
from seqmoe_jax.decode.policy import Coming, PolicyInputs, ReactivePolicy, Routing
from seqmoe_jax.decode.replay import Replay, forced_tokens, hash_tables_in_force, recorded_routing
from seqmoe_jax.decode.state import Offload, Sequences, StepOutput
from seqmoe_jax.decode.token import next_token
from seqmoe_jax.experts.cache import CacheConfig, all_hits
from seqmoe_jax.models import block, fused
from seqmoe_jax.models.spec import ModelSpec, MoESpec
from seqmoe_jax.models.weights import ModelWeights
from seqmoe_jax.prefetch.link import Link
from seqmoe_jax.sampling import SamplingParams

Pools = tuple[Shaped[Array, "E n"], ...]
NO_INPUTS = PolicyInputs()


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What the compiled step is made for. Hashable: a static argument.

    greedy: no sequence draws; else those of temperature 0 do not.
    vocab: of the tokenizer; the output head may have more rows, which must never be drawn.
    kernels: what computes the parts of a layer beside the experts.
    channel: number of the transfer engine that a host callback hands the plans to (`prefetch.channels`).
    """

    spec: ModelSpec
    cache: CacheConfig
    policy: ReactivePolicy
    greedy: bool
    vocab: int
    kernels: fused.DecodeKernels = fused.PLAIN
    channel: int | None = None


def forward(
    sequences: Sequences,
    offload: Offload,
    weights: ModelWeights,
    pools: Pools,
    inputs: PolicyInputs = NO_INPUTS,
    replay: Replay | None = None,
    *,
    config: StepConfig,
) -> tuple[Float32[Array, "B V"], Sequences, Offload, Routed]:
    """One token of every sequence through all layers; nothing is sampled. `Routed` has all layers' ids and weights
    [L, B, K] and their summed counts. Slot scores are still those that the policy made for this step."""
    spec, policy, clock = config.spec, config.policy, offload.cache.clock
    tokens = StepTokens(sequences.token, sequences.position[:, None], ~sequences.done)
    offload = policy.begin(offload)
    with jax.named_scope("landing"):
        cache, transfers = land(offload.cache, inputs.link, config.cache)
    offload = offload._replace(cache=cache)
    with jax.named_scope("embed"):
        x: Any = block.embed(tokens.ids[:, None], weights.embed, spec)
    states, routed = list(sequences.states), list[Routed]()
    for number, (layer, w) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        if not isinstance(layer.mlp, MoESpec):
            x, states[number] = dense_layer(x, states[number], tokens, w, layer=layer, kernels=config.kernels)
            continue
        index = len(routed)
        if index == policy.trigger:
            offload = policy.midway(offload, _so_far(routed), tokens.active, clock, inputs)
        recorded = recorded_routing(replay, offload.steps, jnp.int32(index))
        x, states[number], cache, now = moe_layer(
            x, states[number], offload.cache, tokens, jnp.int32(index), w, pools[index], transfers, recorded,
            layer=layer, kernels=config.kernels, config=config.cache,
        )  # fmt: skip
        offload = offload._replace(cache=cache)
        routed.append(now)
    with jax.named_scope("head"):
        logits = fused.logits_of(fused.settled(x)[:, 0], weights, spec, config.kernels)
    routing = _so_far(routed)
    # At once for all layers: a few small kernels instead of a few per layer.
    counts = jnp.stack([layer.counts for layer in routed]).sum(axis=0)
    counts = counts if config.cache.managed else all_hits(routing.ids, config.cache)
    cache = offload.cache._replace(clock=clock + config.cache.layers)
    offload = offload._replace(cache=cache, steps=offload.steps + 1)
    return logits, sequences._replace(states=tuple(states)), offload, Routed(*routing, counts)


def step(
    sequences: Sequences,
    offload: Offload,
    weights: ModelWeights,
    pools: Pools,
    sampling: SamplingParams,
    eos_token_ids: Int[Array, "B N"],
    link: Link | None = None,
    predictor: dict[str, Any] | None = None,
    replay: Replay | None = None,
    *,
    config: StepConfig,
) -> tuple[Sequences, Offload, StepOutput]:
    """Processes one token of every sequence, samples the next one, forecasts the coming step and plans transfers."""
    key_score = offload.cache.key_score  # the policy replaces it while the step runs; it passes through as it came
    inputs = PolicyInputs(predictor, link, hash_tables_in_force(replay, weights.hash_tables))
    logits, sequences, offload, routed = forward(sequences, offload, weights, pools, inputs, replay, config=config)
    with jax.named_scope("sample"):
        sequences, token, end = next_token(
            logits, sequences, sampling, eos_token_ids, sequences.position + 1, greedily=config.greedy,
            vocab=config.vocab,
        )  # fmt: skip
    coming = Coming(forced_tokens(replay, offload.steps, sequences.token), ~sequences.done)
    offload, tasks = config.policy.end(offload, Routing(routed.ids, routed.weights), coming, inputs)
    output = StepOutput.pack(token, end, routed.counts)
    output = send_plan(output, tasks, offload.cache.clock, link, config.channel)
    return sequences, offload._replace(cache=offload.cache._replace(key_score=key_score)), output


def _so_far(routed: list[Routed]) -> Routing:
    return Routing(jnp.stack([layer.ids for layer in routed]), jnp.stack([layer.weights for layer in routed]))


jitted_step = partial(jax.jit, static_argnames="config", donate_argnums=(0, 1))(step)
