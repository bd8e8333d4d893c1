"""One decode step for all sequences: a single jitted computation (design section 4).

Attention, routing, cache management, miss loading, experts, forecast and sampling run in one XLA program whose state
is donated, in the role that CUDA graphs have in the paper. The host only dispatches it and reads small outputs late.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Shaped

from pallas_kernels.miss_load import miss_load
from pallas_kernels.plan_tasks import SLOT, PlanConfig, plan_tasks
from pallas_kernels.router_choice.config import Recorded
from seqmoe_jax.experts.cache import CacheConfig, SlotCache, Transfers, all_hits, moe_decode, rescore
from seqmoe_jax.experts.slots import SlotState
from seqmoe_jax.forecast import forecaster, history
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.forecaster import Forecast
from seqmoe_jax.models import block, fused
from seqmoe_jax.models.mixers import State
from seqmoe_jax.models.spec import ModelSpec, MoESpec
from seqmoe_jax.models.weights import ModelWeights
from seqmoe_jax.prefetch.channels import deliver
from seqmoe_jax.prefetch.link import Link
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
    """Device state of the offloading that outlives a step; donated to every step."""

    cache: SlotCache
    forecast: Forecast
    predictor: dict[str, Any] | None  # recurrent state; made anew for every request
    tags: Int32[Array, ""]  # tags given to tasks so far
    steps: Int32[Array, ""]  # decode steps run so far
    later: Float32[Array, "C-1 L E"] | None = None  # of the steps after the coming one, for its plan in mid-step


class Replay(NamedTuple):
    """Routing of a recorded run that is forced upon the model, step after step, in a circle; for benchmarks alone."""

    ids: Int32[Array, "T L K"]
    weights: Float32[Array, "T L K"]
    tokens: Int32[Array, " T"]


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Static shape of the compiled programs."""

    spec: ModelSpec
    cache: CacheConfig
    forecast: bool  # policy seqmoe: scores follow the forecast
    greedy: bool
    vocab: int  # of the tokenizer; the output head may have more rows, which must never be drawn
    kernels: fused.DecodeKernels = fused.PLAIN  # beside the experts'
    predictor: PredictorConfig | None = None
    trigger: int | None = None  # MoE layer before which the running step is forecast anew
    plan: PlanConfig | None = None  # None: nothing is prefetched
    ahead: int = 1  # plans are for the step so many steps on
    channel: int | None = None  # of the engine that a host callback hands the plans to

    @property
    def plans_midway(self) -> bool:
        """Whether the running step is planned for anew at the trigger layer, not only the coming one at its end."""
        return self.plan is not None and self.trigger is not None and self.ahead == 1

    @property
    def later(self) -> int:
        """Steps after the running one that the plan in the middle of it is for too."""
        return self.plan.steps - 1 if self.plan is not None and self.plans_midway else 0


class StepOutput(NamedTuple):
    """What the host reads of a step: one small array of tokens [B], ends [B] and counts (routed, hits, misses); the
    last plan, where it is not told in another way, and the position at which it was made."""

    packed: Int32[Array, " 2B+3"]
    tasks: Int32[Array, "5 N"] | None = None
    clock: Int32[Array, ""] | None = None

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


class _Planner:
    """Rescores the cache by a forecast and plans by it, while one step is traced."""

    def __init__(self, config: StepConfig, link: Link | None, tags: Int32[Array, ""]):
        self.config, self.link, self.tags = config, link, tags
        self.tasks: Int32[Array, "5 N"] | None = None  # the last plan

    def follow(
        self, cache: SlotCache, forecast: Forecast, chance: Array | None, base: Array, first_layer: int
    ) -> SlotCache:
        """Scores by `forecast` for layers from `first_layer` on; a plan by `chance` [C, L, E], if one is to be made."""
        key_score = forecaster.worth(forecast)
        if chance is None or self.config.plan is None or self.link is None:
            return rescore(cache, key_score, first_layer * self.config.cache.experts)
        chance = chance.reshape(len(chance), -1)
        with jax.named_scope("plan"):
            tables, self.tags, self.tasks = plan_tasks(
                cache.tables, cache.open_slots, chance, key_score, base=base, next_tag=self.tags,
                transfer_layers=self.link.transfer_cost, first_layer=first_layer, config=self.config.plan,
                board=self.link.board, implementation=self.config.cache.implementation,
            )  # fmt: skip
        return cache._replace(tables=tables, key_score=key_score, open_slots=self.tasks[SLOT])


def forward(
    sequences: Sequences,
    offload: Offload,
    weights: ModelWeights,
    pools: tuple[Shaped[Array, "E n"], ...],
    *,
    config: StepConfig,
) -> tuple[Float32[Array, "B V"], Sequences, Offload, Int32[Array, " 3"]]:
    """One token of every sequence through all layers, nothing sampled. Returns logits, states, and the counts (routed,
    hits, misses)."""
    return _layers(sequences, offload, weights, pools, config=config)[:4]


def _layers(
    sequences: Sequences,
    offload: Offload,
    weights: ModelWeights,
    pools: tuple[Shaped[Array, "E n"], ...],
    *,
    config: StepConfig,
    link: Link | None = None,
    predictor: dict[str, Any] | None = None,
    replay: Replay | None = None,
) -> tuple[Float32[Array, "B V"], Sequences, Offload, Int32[Array, " 3"], Float32[Array, "B keys"], _Planner]:
    """`forward` that plans transfers, and also returns the routing as the predictor reads it, and the planner."""
    spec, cache = config.spec, offload.cache
    layers, experts = config.cache.layers, config.cache.experts
    if config.forecast:
        # Computed, not kept in the state: there it would have to be copied, being read in every layer and replaced.
        with jax.named_scope("rescore"):
            cache = cache._replace(key_score=forecaster.worth(offload.forecast))
    with jax.named_scope("landing"):
        transfers, blocks = _receive(cache, link, config.cache, config.plan)
    cache = cache._replace(blocks=blocks)
    planner = _Planner(config, link, offload.tags)
    base = cache.clock
    active = ~sequences.done
    positions = sequences.position[:, None]
    with jax.named_scope("embed"):
        x: Array | fused.Pending = block.embed(sequences.token[:, None], weights.embed, spec)
    states, routing = list(sequences.states), list[Int[Array, "B K"]]()
    counts: list[Int32[Array, " 3"]] = []
    shares: list[Float[Array, "B K"]] = []

    @jax.named_scope("forecast")
    def known() -> Float32[Array, "B keys"]:
        return forecaster.features(jnp.stack(routing), jnp.stack(shares), layers=layers, experts=experts)

    replayed = jnp.int32(0) if replay is None else offload.steps % replay.ids.shape[0]
    for index, (layer, w) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        with jax.named_scope(f"layer{index}/mixer"):
            x, states[index] = fused.mix(x, states[index], positions, active, w, layer, config.kernels)
        if not isinstance(layer.mlp, MoESpec):
            with jax.named_scope(f"layer{index}/mlp"):
                x = block.dense(fused.settled(x), w, layer)
        else:
            moe_index = len(routing)
            if config.predictor is not None and moe_index == config.trigger:
                assert predictor is not None
                assert offload.predictor is not None
                with jax.named_scope("refine"):
                    again = forecaster.refine(config.predictor, predictor, offload.predictor, known(), active)
                    forecast = offload.forecast.at[0, moe_index * experts :].set(
                        again.reshape(-1)[moe_index * experts :]
                    )
                    chance = again[None] if config.plans_midway else None
                    if chance is not None and offload.later is not None:
                        chance = jnp.concatenate([chance, offload.later])
                    cache = planner.follow(cache, forecast, chance, base, moe_index)
            with jax.named_scope(f"layer{index}/moe"):
                recorded = None if replay is None else Recorded(replay.ids, replay.weights, replayed, moe_index)
                normed, mixing, ids, expert_weights = fused.route(
                    x, sequences.token, active, w, layer, config.kernels, recorded
                )
                pool = pools[moe_index]
                y, cache, new = moe_decode(normed, ids, expert_weights, cache, pool, moe_index, config.cache, transfers)
                routing.append(ids)
                shares.append(expert_weights)
                counts.append(new)
                x = fused.moe_output(x, normed, mixing, y, w, layer, config.kernels)
        # Without this XLA recomputes sums of earlier layers inside later fusions, and compiling takes time that
        # is exponential in the number of layers (ten layers at batch 4 for a GPU: over 280 s, against 18 s).
        x = jax.lax.optimization_barrier(x)
    forecast = offload.forecast
    if config.forecast and config.predictor is None:
        with jax.named_scope("forecast"):
            forecast = forecaster.from_history(history.observe(forecast[1], jnp.stack(routing), experts))
    # At once for all layers: a few small kernels instead of a few per layer.
    total = jnp.stack(counts).sum(axis=0) if config.cache.managed else all_hits(jnp.stack(routing), config.cache)
    with jax.named_scope("head"):
        logits = fused.logits_of(fused.settled(x)[:, 0], weights, spec, config.kernels)
    cache = cache._replace(clock=base + layers)
    offload = offload._replace(cache=cache, forecast=forecast, steps=offload.steps + 1)
    return logits, sequences._replace(states=tuple(states)), offload, total, known(), planner


def _receive(
    cache: SlotCache, link: Link | None, config: CacheConfig, plan: PlanConfig | None
) -> tuple[Transfers | None, Shaped[Array, "rows n"]]:
    """What `slot_update` needs to know of the engine; blocks with the arrivals copied in."""
    if link is None or plan is None:
        return None, cache.blocks
    if link.landed is not None:
        return Transfers(link.landed, link.progress), cache.blocks
    assert link.arrivals is not None
    slot, tag, blocks = link.arrivals.slot, link.arrivals.tag, cache.blocks
    at = jnp.maximum(slot, 0)
    expected = (cache.tables.state[at] == SlotState.FETCH) & (cache.tables.tag[at] == tag) & (tag > 0)
    for index, arrived in enumerate(link.arrivals.blocks):
        target = jnp.where(expected[index], slot[index], -1).reshape(1)
        blocks = miss_load(blocks, arrived[None], jnp.zeros(1, jnp.int32), target, implementation=config.implementation)
    landed = jnp.zeros_like(cache.tables.tag).at[jnp.where(tag != 0, slot, config.slots)].set(tag, mode="drop")
    return Transfers(landed, None), blocks


def step(
    sequences: Sequences,
    offload: Offload,
    weights: ModelWeights,
    pools: tuple[Shaped[Array, "E n"], ...],
    sampling: SamplingParams,
    end_tokens: Int[Array, " N"],
    link: Link | None = None,
    predictor: dict[str, Any] | None = None,
    replay: Replay | None = None,
    *,
    config: StepConfig,
) -> tuple[Sequences, Offload, StepOutput]:
    """Processes one token of every sequence, samples the next one, forecasts the coming step and plans transfers."""
    key_score = offload.cache.key_score  # passes through as it came: see `forward`
    logits, sequences, offload, counts, routing, planner = _layers(
        sequences, offload, weights, pools, config=config, link=link, predictor=predictor, replay=replay
    )
    with jax.named_scope("sample"):
        sequences, token, end = choose(logits, sequences, sampling, end_tokens, sequences.position + 1, config)
    output = StepOutput.pack(token, end, counts)
    if not config.forecast:
        return sequences, offload, output
    forecast, cache = offload.forecast, offload.cache
    chance = None
    if config.predictor is not None:
        assert predictor is not None
        assert offload.predictor is not None
        with jax.named_scope("forecast"):
            coming = sequences.token
            if replay is not None:
                coming = jnp.broadcast_to(replay.tokens[offload.steps % replay.tokens.shape[0]], coming.shape)
            state, forecast, chance = forecaster.foresee(
                config.predictor, predictor, offload.predictor, routing, coming, ~sequences.done, ahead=config.ahead,
                steps=1 if config.plan is None else config.plan.steps,
            )  # fmt: skip
            offload = offload._replace(predictor=state, forecast=forecast, later=chance[1:] if config.later else None)
    if (tables := weights.hash_tables) and replay is None:
        shape = config.cache.layers, config.cache.experts
        known = forecaster.known_routing(forecast[0].reshape(shape), tables, sequences.token, ~sequences.done)
        forecast = forecast.at[0].set(known.reshape(-1))
        offload = offload._replace(forecast=forecast)
        if chance is not None and config.ahead == 1:
            chance = chance.at[0].set(known)
    cache = planner.follow(cache, forecast, chance, cache.clock + (config.ahead - 1) * config.cache.layers, 0)
    if planner.tasks is not None and (link is None or link.board is None):
        output = output._replace(tasks=planner.tasks, clock=cache.clock)
        if config.channel is not None:
            io_callback(partial(deliver, config.channel), None, output.tasks, output.clock)
    cache = cache._replace(key_score=key_score)
    return sequences, offload._replace(cache=cache, tags=planner.tags), output


jitted_step = partial(jax.jit, static_argnames="config", donate_argnums=(0, 1))(step)
