"""What a decode step reads and writes: the sequences, the state of the offloading, and its output."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from seqmoe_jax.experts.cache import CacheConfig, SlotCache, empty_cache
from seqmoe_jax.forecast.forecaster import Forecast, no_forecast
from seqmoe_jax.models.mixers import State
from seqmoe_jax.models.spec import ModelSpec
from seqmoe_jax.programs import owned

# What a step says of a sequence: goes on, end token, length reached, logits that are no finite numbers.
RUNNING, STOPPED, EXHAUSTED, NON_FINITE = range(4)


class Sequences(NamedTuple):
    """Device state of the sequences being generated; donated to every step."""

    states: tuple[State, ...]  # of the layers' mixers
    token: Int32[Array, " B"]  # sampled last, processed next
    position: Int32[Array, " B"]  # where that token will stand
    remaining: Int32[Array, " B"]  # tokens that may still be sampled
    done: Bool[Array, " B"]


@owned
@partial(jax.jit, static_argnames=("spec", "batch", "capacity", "dtype"))
def empty_sequences(*, spec: ModelSpec, batch: int, capacity: int, dtype: np.dtype) -> Sequences:
    """Room for `capacity` positions of every sequence; nothing in it."""
    states = tuple(layer.mixer.init_state(batch, capacity, dtype) for layer in spec.layers)
    flat = jnp.zeros(batch, jnp.int32)
    return Sequences(states, flat, flat, flat, jnp.zeros(batch, bool))


class Offload(NamedTuple):
    """Device state of the offloading that outlives a step; donated to every step."""

    cache: SlotCache
    forecast: Forecast  # of the coming step
    predictor: Any  # its recurrent state, a pytree made anew for every request; None without a predictor
    tags: Int32[Array, ""]  # tags given to tasks so far
    steps: Int32[Array, ""]  # decode steps run so far


def empty_offload(config: CacheConfig) -> Offload:
    """Nothing is resident and nothing was seen."""
    return Offload(
        cache=empty_cache(config),
        forecast=no_forecast(config.layers * config.experts),
        predictor=None,
        tags=jnp.zeros((), jnp.int32),
        steps=jnp.zeros((), jnp.int32),
    )


class StepOutput(NamedTuple):
    """What the host reads of a step.

    packed: one small array: the new tokens [B], what became of the sequences [B] (`RUNNING`, ...), and the counts
        (experts routed, hits, misses).
    tasks: the last plan, for engines that read it from here.
    clock: the position at which that plan was made.
    """

    packed: Int32[Array, " 2B+3"]
    tasks: Int32[Array, "5 N"] | None = None
    clock: Int32[Array, ""] | None = None

    @classmethod
    def pack(cls, token: Int[Array, " B"], end: Int[Array, " B"], counts: Int[Array, " 3"]) -> StepOutput:
        return cls(jnp.concatenate([token, end, counts]).astype(jnp.int32))
