"""Traces as arrays on the device, and batches for training and evaluation that are cut from them there.

Positions are those of `predictor`: position t reads the routing of step t - 1 and token t, and its target is step t.
Shapes: T steps, N sequences, B windows; keys = L * E.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from seqmoe_jax.errors import PredictorError
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.features import activation_features, echo_steps, steps_until_use
from seqmoe_jax.forecast.heads import Inputs
from seqmoe_jax.traces.format import Trace

BLOCK = 16384  # steps that are converted at a time, so that float32 copies of a long trace stay small


class Steps(NamedTuple):
    """T steps of N sequences, of which `starts` and `ends` are the first step and the step after the last.

    `rows` are the embedding rows of the tokens; `echo` is the index of the step that each step's echo comes from, or
    -1; `until` is made by `features.steps_until_use`; `decoded` is false where a step belongs to a prompt.
    """

    features: Float[Array, "T keys"]
    until: Integer[Array, "T keys"]
    rows: Int[Array, " T"]
    echo: Int[Array, " T"]
    decoded: Bool[Array, " T"]
    starts: Int[Array, " N"]
    ends: Int[Array, " N"]


class Batch(NamedTuple):
    """Windows of B sequences. Positions past the end of a sequence are not `valid`.

    Recall is taken over the `scored` positions, which are not of a prompt and have routing before them. `left` is the
    number of steps that follow each position.
    """

    inputs: Inputs
    target: Float[Array, "B T keys"]
    until: Integer[Array, "B T keys"]
    valid: Bool[Array, "B T"]
    scored: Bool[Array, "B T"]
    left: Int[Array, "B T"]


def prepare(trace: Trace, config: PredictorConfig, table: Integer[np.ndarray, " vocabulary"] | None) -> Steps:
    """A trace's steps as device arrays; `table` is the embedding row of every token id (`features.token_table`).

    Raises `PredictorError` where the trace is of another shape of model or has a token that the table lacks.
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
    return Steps(
        features=jnp.asarray(features),
        until=jnp.asarray(steps_until_use(features > 0, offsets)),
        rows=jnp.asarray(rows),
        echo=jnp.asarray(echo, jnp.int32),
        decoded=jnp.asarray(trace.decoded()),
        starts=jnp.asarray(offsets[:-1], jnp.int32),
        ends=jnp.asarray(offsets[1:], jnp.int32),
    )


@functools.partial(jax.jit, static_argnames=("length", "config"))
def window(
    steps: Steps, starts: Int[Array, " B"], ends: Int[Array, " B"], length: int, config: PredictorConfig
) -> Batch:
    """The `length` steps from `starts` on of sequences that end before `ends`.

    What came before `starts` is hidden: the first position reads no routing, and echoes from there are left out.
    """
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


def sample(steps: Steps, key: Array, batch: int, length: int, crop: float, config: PredictorConfig) -> Batch:
    """A training batch of sequences drawn in proportion to their length.

    With probability `crop` a window begins anywhere in the first half of its sequence.
    """
    which, whether, where = jax.random.split(key, 3)
    size = (steps.ends - steps.starts).astype(jnp.float32)
    sequence = jax.random.categorical(which, jnp.log(size), shape=(batch,))
    start, end = steps.starts[sequence], steps.ends[sequence]
    room = (end - start) // 2
    offset = (jax.random.uniform(where, (batch,)) * room).astype(jnp.int32)
    cropped = jax.random.bernoulli(whether, crop, (batch,))
    # Windows of a sequence longer than they are begin at random, so that every part of it is seen at times.
    excess = jnp.maximum(end - start - length, 0)
    slack = (jax.random.uniform(jax.random.fold_in(where, 1), (batch,)) * (excess + 1)).astype(jnp.int32)
    sampled: Batch = window(steps, start + jnp.maximum(jnp.where(cropped, offset, 0), slack), end, length, config)
    return sampled


def batches(steps: Steps, config: PredictorConfig) -> Iterator[Batch]:
    """Whole sequences in batches of one shape, longest first; the last batch is filled up with empty sequences."""
    starts, ends = np.asarray(steps.starts), np.asarray(steps.ends)
    # On an accelerator the recurrent evaluation takes as long for many sequences as for few.
    size = min(16 if jax.default_backend() == "cpu" else 96, len(starts))
    length = -(-int((ends - starts).max()) // 64) * 64
    order = np.argsort(starts - ends, kind="stable")
    for first in range(0, len(order), size):
        part = order[first : first + size]
        begin, stop = np.zeros(size, np.int32), np.zeros(size, np.int32)
        begin[: len(part)], stop[: len(part)] = starts[part], ends[part]
        yield window(steps, jnp.asarray(begin), jnp.asarray(stop), length, config)


def divide(trace: Trace, seed: int = 0, share: float = 0.1) -> tuple[Trace, Trace]:
    """(training, validation) sequences; early stopping looks at the validation ones, a tenth by default."""
    if trace.sequences < 2:
        raise PredictorError(f"training needs at least 2 sequences, got {trace.sequences}")
    order = np.random.default_rng(seed).permutation(trace.sequences)
    held = max(1, round(share * trace.sequences))
    return trace.take(np.sort(order[held:])), trace.take(np.sort(order[:held]))
