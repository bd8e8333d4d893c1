"""A predictor's forecasts over a trace, as the simulator reads them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from seqmoe_jax.forecast import inference
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.data import Batch, prepare, window
from seqmoe_jax.forecast.evaluation.metrics import forecast, refined
from seqmoe_jax.forecast.heads import Inputs, embed, heads, membership
from seqmoe_jax.forecast.predictor import params_of
from seqmoe_jax.traces.forecasts import Forecasts
from seqmoe_jax.traces.format import Trace

BATCH = 4  # sequences at a time, because a rollout of 8 steps holds 8 forecasts per step


def forecasts_of(
    config: PredictorConfig,
    weights: dict[str, Any],
    trace: Trace,
    *,
    rollout: int = 7,
    name: str = "predictor",
) -> Forecasts:
    """What the predictor says at every step of a trace, as `Forecasts` defines it.

    The mid-step forecast is made at layer L/2; `rollout` is the number of steps after the coming one that are forecast.
    """
    trigger = max(config.layers // 2, 1)
    shape = (trace.steps, config.layers, config.experts)
    following, again, kept = (np.zeros(shape, np.float16) for _ in range(3))
    ahead = np.zeros((shape[0], rollout, *shape[1:]), np.float16)
    steps = prepare(trace, config, weights.get("token_table"))
    params = params_of(config, weights)
    order = np.argsort(-trace.lens, kind="stable")
    for first in range(0, len(order), BATCH):
        part = order[first : first + BATCH]
        length = -(-int(trace.lens[part[0]]) // 64) * 64
        batch = window(steps, steps.starts[part], steps.ends[part], length, config)
        outputs = forecast(config, params, batch)
        mid = refined(config, params, batch, outputs, trigger)
        now = np.asarray(jax.nn.sigmoid(membership(weights, outputs.next)), np.float16)
        then = np.asarray(jax.nn.sigmoid(membership(weights, mid, refined=True)), np.float16)
        later = np.asarray(jax.nn.sigmoid(outputs.retention), np.float16)
        rolled = np.asarray(_rollouts(config, weights, batch, rollout)) if rollout else None
        for row, sequence in enumerate(part):
            start, stop = int(trace.seq_offsets[sequence]), int(trace.seq_offsets[sequence + 1])
            size = stop - start
            following[start:stop], again[start:stop] = now[row, :size], then[row, :size]
            kept[start:stop] = later[row, :size]
            if rolled is not None:
                ahead[start:stop] = rolled[:size, row]
    return Forecasts(
        next=following,
        refined=again if trigger < config.layers else None,
        trigger=trigger if trigger < config.layers else None,
        retention=kept,
        rollout=ahead if rollout else None,
        name=name,
    )


@functools.partial(jax.jit, static_argnames=("config", "steps"))
def _rollouts(config: PredictorConfig, weights: dict[str, Any], batch: Batch, steps: int) -> Float[Array, "T B C L E"]:
    """At every position, forecasts of the `steps` steps after the one it forecasts."""
    dtype = weights["in_proj"].dtype

    def at(blocks: Any, inputs: Inputs) -> tuple[Any, Array]:
        x, blocks = inference.trunk(config, weights, embed(config, weights, inputs, dtype), blocks)
        state = {"blocks": blocks, "logits": heads(config, weights, x)[0]}
        return blocks, inference.rollout(config, weights, state, steps + 1)[:, 1:].astype(jnp.float16)

    by_time = jax.tree.map(lambda array: jnp.moveaxis(array, 1, 0), batch.inputs)
    start = inference.init_state(config, batch.valid.shape[0], dtype)["blocks"]
    return jax.lax.scan(at, start, by_time)[1]
