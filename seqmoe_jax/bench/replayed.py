"""Routing for a benchmark: a trace as it is, or stretched to a model of another shape by a stated rule."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from seqmoe_jax.decode.replay import Replay
from seqmoe_jax.errors import TraceError
from seqmoe_jax.models.spec import ModelSpec
from seqmoe_jax.traces.format import Trace
from seqmoe_jax.traces.stretch import stretch

LONG = 200  # steps that a sequence must have to be replayed, as in the measurements we compare with


def replay_of(trace: Trace, spec: ModelSpec, steps: int, *, least: int = LONG) -> Replay:
    """The first `steps` steps of the trace's sequences of at least `least` steps, back to back.

    A model of another shape gets the trace as `traces.stretch` makes it for that shape, so that a predictor trained on
    the stretched split `train` forecasts what is replayed of the split `test`.
    """
    trace = stretch(trace, layers=len(spec.moe_layers), experts=spec.moe.num_experts, active=spec.moe.top_k)
    chosen = np.flatnonzero(trace.lens >= least)
    if not chosen.size:
        raise TraceError(f"no sequence of the trace has {least} steps; give another split or trace")
    long = trace.take(chosen[: 1 + np.searchsorted(trace.lens[chosen].cumsum(), steps)])
    weights = long.probs_u8[:steps].astype(np.float32) + 0.5
    weights /= weights.sum(-1, keepdims=True)
    arrays = long.ids[:steps].astype(np.int32), weights, long.tok[:steps].astype(np.int32)
    return Replay(*map(jnp.asarray, arrays))
