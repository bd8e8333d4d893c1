"""How a transfer engine and the decode step meet: experts that have arrived land, and plans go out."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax.experimental import io_callback
from jaxtyping import Array, Int

from pallas_kernels.miss_load import miss_load
from seqmoe_jax.decode.state import StepOutput
from seqmoe_jax.experts.cache import CacheConfig, Landings, SlotCache
from seqmoe_jax.experts.slots import SlotState
from seqmoe_jax.prefetch.channels import deliver
from seqmoe_jax.prefetch.link import Arrivals, Link, LiveLink, StagedLink


def land(cache: SlotCache, link: Link | None, config: CacheConfig) -> tuple[SlotCache, Landings | None]:
    """The cache with the arrivals copied into their slots, and what `slot_update` needs to know of the engine."""
    if link is None:
        return cache, None
    if isinstance(link, LiveLink):
        return cache, Landings(link.landed, link.progress)
    return _copy_arrivals(cache, link.arrivals, config)


def _copy_arrivals(cache: SlotCache, arrivals: Arrivals, config: CacheConfig) -> tuple[SlotCache, Landings]:
    slot, tag, blocks = arrivals.slot, arrivals.tag, cache.blocks
    at = jnp.maximum(slot, 0)
    expected = (cache.tables.state[at] == SlotState.FETCH) & (cache.tables.tag[at] == tag) & (tag > 0)
    for index, arrived in enumerate(arrivals.blocks):
        target = jnp.where(expected[index], slot[index], -1).reshape(1)
        blocks = miss_load(blocks, arrived[None], jnp.zeros(1, jnp.int32), target, implementation=config.implementation)
    landed = jnp.zeros_like(cache.tables.tag).at[jnp.where(tag != 0, slot, config.slots)].set(tag, mode="drop")
    return cache._replace(blocks=blocks), Landings(landed, None)


def send_plan(
    output: StepOutput, tasks: Int[Array, "5 N"] | None, clock: Int[Array, ""], link: Link | None, channel: int | None
) -> StepOutput:
    """The output with the plan, where the engine has no board on which `plan_tasks` wrote it already."""
    if tasks is None or not isinstance(link, StagedLink):
        return output
    if channel is not None:
        io_callback(partial(deliver, channel), None, tasks, clock)
    return output._replace(tasks=tasks, clock=clock)
