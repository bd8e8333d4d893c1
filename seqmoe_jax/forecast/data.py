"""Traces as arrays on the device, and training batches cut from them there.

Positions as in `predictor`: position t reads step t - 1 and token t, and its target is step t.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from seqmoe_jax.errors import PredictorError
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.features import activation_features, echo_steps, steps_until_use
from seqmoe_jax.forecast.predictor import Inputs
from seqmoe_jax.traces.format import Trace

BLOCK = 16384  # steps converted at a time: float32 copies of a long trace stay small


class Steps(NamedTuple):
    """T steps of N sequences. `echo` is an index of a step or -1, `until` as in `features.steps_until_use`; `decoded`
    is false where a step belongs to a prompt."""

    features: Float[Array, "T keys"]
    until: Integer[Array, "T keys"]
    rows: Int[Array, " T"]
    echo: Int[Array, " T"]
    decoded: Bool[Array, " T"]
    starts: Int[Array, " N"]
    ends: Int[Array, " N"]


class Batch(NamedTuple):
    """Windows of B sequences; positions past a sequence's end are not `valid`. `left`: steps after each position.

    `scored`: the positions that recall is taken over, which are not of a prompt and have routing before them.
    """

    inputs: Inputs
    target: Float[Array, "B T keys"]
    until: Integer[Array, "B T keys"]
    valid: Bool[Array, "B T"]
    scored: Bool[Array, "B T"]
    left: Int[Array, "B T"]


def prepare(
    trace: Trace,
    config: PredictorConfig,
    table: Integer[np.ndarray, " vocabulary"] | None,
    *,
    room: tuple[int, int] | None = None,
) -> Steps:
    """A trace's steps as device arrays. Raises `PredictorError` where the trace is of another shape of model.

    `room` (steps, sequences) pads with steps of no sequence and empty sequences: data sets of one shape share what
    is compiled.
    """
    config.check(layers=trace.layers, experts=trace.num_experts, active=trace.active)
    steps = trace.steps
    features = np.zeros((steps, config.keys), ml_dtypes.bfloat16)
    for start in range(0, steps, BLOCK):
        cut = slice(start, start + BLOCK)
        features[cut] = activation_features(trace.ids[cut], trace.probs_u8[cut], trace.num_experts)
    offsets = np.asarray(trace.seq_offsets, np.int64)
    rows = np.zeros(steps, np.int32)
    echo = np.full(steps, -1, np.int64)
    if config.uses_token:
        if table is None or int(trace.tok.max()) >= len(table):
            size = 0 if table is None else len(table)
            raise PredictorError(f"token id {int(trace.tok.max())} is beyond the predictor's vocabulary of {size}")
        rows = np.asarray(table, np.int32)[trace.tok]
    if config.uses_echo:
        echo = echo_steps(trace.tok, offsets, config.echo)
    more, empty = (0, 0) if room is None else (room[0] - steps, room[1] - trace.sequences)

    def padded(array: np.ndarray, count: int) -> Array:
        return jnp.asarray(np.pad(array, ((0, count),) + ((0, 0),) * (array.ndim - 1)))

    return Steps(
        features=padded(features, more),
        until=padded(steps_until_use(features > 0, offsets), more),
        rows=padded(rows, more),
        echo=padded(echo.astype(np.int32), more),
        decoded=padded(trace.decoded(), more),
        starts=padded(offsets[:-1].astype(np.int32), empty),
        ends=padded(offsets[1:].astype(np.int32), empty),
    )


def window(
    steps: Steps, starts: Int[Array, " B"], ends: Int[Array, " B"], length: int, config: PredictorConfig
) -> Batch:
    """Steps starts..starts+length of each sequence; what came before `starts` is hidden, echoes too."""
    position = starts[:, None] + jnp.arange(length, dtype=jnp.int32)
    valid = position < ends[:, None]
    position = jnp.minimum(position, ends[:, None] - 1)
    seen = valid[..., None]
    follows = valid & (position > starts[:, None])
    before = jnp.where(follows[..., None], steps.features[position - 1], 0)
    rows = echo = None
    if config.uses_token:
        rows = steps.rows[position]
    if config.uses_echo:
        source = steps.echo[position]
        usable = seen & (source >= starts[:, None])[..., None]
        echo = jnp.where(usable, steps.features[jnp.maximum(source, 0)], 0)
    target = jnp.where(seen, steps.features[position], 0)
    left = ends[:, None] - 1 - position
    scored = follows & steps.decoded[position]
    return Batch(Inputs(before, rows, echo), target, steps.until[position], valid, scored, left)


def sample(steps: Steps, key: Array, batch: int, length: int, crop: float | Array, config: PredictorConfig) -> Batch:
    """A training batch: sequences drawn by length; with probability `crop` one begins anywhere in its first half."""
    which, whether, where = jax.random.split(key, 3)
    size = (steps.ends - steps.starts).astype(jnp.float32)
    sequence = jax.random.categorical(which, jnp.log(size), shape=(batch,))
    start, end = steps.starts[sequence], steps.ends[sequence]
    room = (end - start) // 2
    offset = (jax.random.uniform(where, (batch,)) * room).astype(jnp.int32)
    cropped = jax.random.bernoulli(whether, jnp.asarray(crop, jnp.float32), (batch,))
    # A sequence longer than the window begins late enough that every part of it is seen at times.
    excess = jnp.maximum(end - start - length, 0)
    slack = (jax.random.uniform(jax.random.fold_in(where, 1), (batch,)) * (excess + 1)).astype(jnp.int32)
    return window(steps, start + jnp.maximum(jnp.where(cropped, offset, 0), slack), end, length, config)


def divide(trace: Trace, seed: int = 0, share: float = 0.1) -> tuple[Trace, Trace]:
    """(training, validation) sequences; the validation tenth is what early stopping and tuning look at."""
    if trace.sequences < 2:
        raise PredictorError(f"training needs at least 2 sequences, got {trace.sequences}")
    order = np.random.default_rng(seed).permutation(trace.sequences)
    held = max(1, round(share * trace.sequences))
    return trace.take(np.sort(order[held:])), trace.take(np.sort(order[:held]))


def shuffle_steps(trace: Trace, seed: int = 0) -> Trace:
    """The control: steps of every sequence in random order, so that only their frequency is left."""
    random = np.random.default_rng(seed)
    spans = zip(trace.seq_offsets[:-1], trace.seq_offsets[1:], strict=True)
    order = np.concatenate([start + random.permutation(int(end - start)) for start, end in spans])
    return dataclasses.replace(trace, ids=trace.ids[order], probs_u8=trace.probs_u8[order], tok=trace.tok[order])
