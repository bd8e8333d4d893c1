"""Routing for a benchmark: a trace as it is, or stretched to a model of another shape by a stated rule."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32

from seqmoe_jax.decode import Replay
from seqmoe_jax.errors import TraceError
from seqmoe_jax.models.spec import ModelSpec
from seqmoe_jax.traces.format import Trace

LONG = 200  # steps that a sequence must have to be replayed, as in the measurements we compare with


def replay_of(trace: Trace, spec: ModelSpec, steps: int, *, least: int = LONG) -> Replay:
    """The first `steps` steps of the trace's sequences of at least `least` steps, back to back.

    A model of another shape gets routing made of the trace's, of k among e experts in each of l layers, by this rule.
    Layer i reads layer i % l of the trace, from another place in it (the steps, read in a circle, are cut into as many
    stretches as are needed), so that added layers route as differently as other text would. K active experts are K / k
    streams that begin at different stretches. The E / e groups of e experts are dealt out to the streams in turn, and
    expert x of a stream is x in one of its groups, the one that a digit of the sum of the step's k experts says, so
    that each group is used more rarely. Weights are the trace's, divided by the number of streams.
    """
    layers, experts, active = len(spec.moe_layers), spec.moe.experts, spec.moe.top_k
    chosen = np.flatnonzero(trace.lens >= least)
    if not chosen.size:
        raise TraceError(f"no sequence of the trace has {least} steps; give another split or trace")
    long = trace.take(chosen)
    ids = long.ids.astype(np.int32)
    weights = long.probs_u8.astype(np.float32) + 0.5
    weights /= weights.sum(-1, keepdims=True)
    if (layers, experts, active) != (trace.layers, trace.num_experts, trace.active):
        ids, weights = _stretch(ids, weights, trace.num_experts, layers, experts, active)
    steps = min(steps, ids.shape[0])
    arrays = ids[:steps], weights[:steps], long.tok[:steps].astype(np.int32)
    return Replay(*map(jnp.asarray, arrays))


def _stretch(
    ids: Int32[np.ndarray, "T l k"],
    weights: Float32[np.ndarray, "T l k"],
    e: int,
    layers: int,
    experts: int,
    active: int,
) -> tuple[Int32[np.ndarray, "T L K"], Float32[np.ndarray, "T L K"]]:
    steps, below, k = ids.shape
    streams = active // k
    if active % k or streams * e > experts:
        raise TraceError(
            f"routing of {k} of {e} experts cannot be stretched to {active} of {experts}: "
            f"expected a multiple of {k} active and at least {streams * e} experts"
        )
    groups = experts // e  # of which a stream uses every `streams`-th
    copies = -(-layers // below) * streams
    shift = steps // copies
    out = np.empty((steps, layers, active), np.int32)
    share = np.empty((steps, layers, active), np.float32)
    for layer in range(layers):
        for stream in range(streams):
            offset = ((layer // below) * streams + stream) * shift
            part = slice(stream * k, (stream + 1) * k)
            rolled = np.roll(ids[:, layer % below], -offset, axis=0)
            width = groups // streams
            group = stream + streams * (rolled.sum(-1, keepdims=True) // 8 % width)
            out[:, layer, part] = group * e + rolled
            share[:, layer, part] = np.roll(weights[:, layer % below], -offset, axis=0) / streams
    return out, share
