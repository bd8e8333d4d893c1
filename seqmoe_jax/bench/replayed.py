"""Routing for a benchmark: a trace as it is, or stretched to a model of another shape by a stated rule."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int32

from seqmoe_jax.decode import Replay
from seqmoe_jax.errors import TraceError
from seqmoe_jax.models.spec import ModelSpec
from seqmoe_jax.traces.format import Trace

LONG = 200  # steps that a sequence must have to be replayed, as in the measurements we compare with


def replay_of(trace: Trace, spec: ModelSpec, steps: int, *, least: int = LONG) -> Replay:
    """The first `steps` steps of the trace's sequences of at least `least` steps, back to back.

    A model of more layers or experts than the trace gets routing made of it, by this rule. Layer l reads layer l % L of
    the trace, its stretch l // L of the steps (the steps are cut into as many stretches as needed, and each is read in a
    circle), so that layers have routing as different as different texts have. K experts of E are made of K / k streams,
    where the trace has k of e: stream j reads the stretch after, and its expert x becomes expert j * e + x; E must be at
    least (K / k) * e, and the experts that are left over are used by nobody in that stream but stand in for x in every
    second group of e, chosen by the parity of the layer. Weights are those of the trace, divided by the number of streams.
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
    return Replay(ids=ids[:steps], weights=weights[:steps], tokens=long.tok[:steps].astype(np.int32))


def _stretch(
    ids: Int32[np.ndarray, "T l k"], weights: Float32[np.ndarray, "T l k"], e: int, layers: int, experts: int, active: int
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
            # An expert of the trace is split over the groups of its stream by the parity of the token's other experts:
            # each group then has its own, sparser use.
            width = groups // streams
            group = stream + streams * (rolled.sum(-1, keepdims=True) // 8 % width)
            out[:, layer, part] = group * e + rolled
            share[:, layer, part] = np.roll(weights[:, layer % below], -offset, axis=0) / streams
    return out, share
