"""The recall table: a predictor and the baselines, one step and rollouts of 1 to 8, per layer, short and long."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from seqmoe_jax.forecast import inference as plain
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.data import Batch, Steps
from seqmoe_jax.forecast.evaluation.baselines import Scores
from seqmoe_jax.forecast.evaluation.metrics import Hits, batches, forecast, hits_jit, refined
from seqmoe_jax.forecast.predictor import Inputs, embed, heads

HORIZON = 8
LONG = 256  # steps from which a sequence counts as long

Row = dict[str, Any]


def evaluate_predictor(
    config: PredictorConfig,
    params: Any,
    weights: Mapping[str, Any],
    steps: Steps,
    *,
    trigger: int | None = None,
    rollouts: bool = True,
    bfloat16: bool = False,
) -> Row:
    """One row of the table. `params` is the NNX state, `weights` the same as a plain pytree (for the rollouts)."""
    trigger = config.layers // 2 if trigger is None else trigger
    tally = _Tally(config, rollouts)
    for batch in batches(steps, config):
        outputs = forecast(config, params, batch, bfloat16)
        tally.add(outputs.next, batch)
        tally.add_refined(refined(config, params, batch, outputs, trigger), batch)
        if rollouts:
            tally.add_rollout(*_rollout_hits(config, dict(weights), batch))
    return tally.row(trigger)


def evaluate_baseline(config: PredictorConfig, scores: Scores, steps: Steps) -> Row:
    tally = _Tally(config, True)
    for batch in batches(steps, config):
        tally.add(scores(batch.inputs.features, 1), batch)
        target = batch.target.reshape(*batch.valid.shape, config.layers, config.experts)
        found, count = np.zeros(HORIZON), np.zeros(HORIZON)
        for ahead in range(1, HORIZON + 1):
            later = scores(batch.inputs.features[:, : batch.valid.shape[1] - ahead + 1], ahead)
            # The last known step is the one before the position, so position t + ahead - 1 is `ahead` steps on.
            mask = batch.scored[:, : later.shape[1]] & batch.valid[:, ahead - 1 :]
            got = hits_jit(later, target[:, ahead - 1 :], mask, config.active)
            found[ahead - 1], count[ahead - 1] = float(got.found[3].sum()), float(got.steps)
        tally.add_rollout(found, count)
    return tally.row(None)


class _Tally:
    """Sums of hits over batches."""

    def __init__(self, config: PredictorConfig, rollouts: bool):
        nothing = Hits(jnp.zeros((5, config.layers)), jnp.zeros(()))
        self.config, self.rollouts = config, rollouts
        self.all = self.long = self.after = nothing
        self.found, self.count = np.zeros(HORIZON), np.zeros(HORIZON)

    def add(self, scores: Array, batch: Batch) -> None:
        target = batch.target.reshape(scores.shape)
        mask = batch.scored
        long = mask & (batch.valid.sum(1, keepdims=True) >= LONG)
        self.all = self.all + hits_jit(scores, target, mask, self.config.active)
        self.long = self.long + hits_jit(scores, target, long, self.config.active)

    def add_refined(self, scores: Array, batch: Batch) -> None:
        mask = batch.scored
        self.after = self.after + hits_jit(scores, batch.target.reshape(scores.shape), mask, self.config.active)

    def add_rollout(self, found: Any, count: Any) -> None:
        self.found, self.count = self.found + np.asarray(found), self.count + np.asarray(count)

    def row(self, trigger: int | None) -> Row:
        active = self.config.active
        recall = self.all.recall(active)
        short = Hits(self.all.found - self.long.found, self.all.steps - self.long.steps)
        row: Row = {
            "recall_at": {str(active + extra): _round(recall[extra].mean()) for extra in range(len(recall))},
            "per_layer": [_round(value) for value in recall[3]],
            "short": _round(short.recall(active)[3].mean()) if float(short.steps) else None,
            "long": _round(self.long.recall(active)[3].mean()) if float(self.long.steps) else None,
            "long_from": LONG,
            "steps": int(self.all.steps),
        }
        if self.rollouts:
            scale = np.maximum(self.count * active * self.config.layers, 1)
            row["rollout"] = [_round(value) for value in self.found / scale]
        if trigger is not None and trigger + 1 < self.config.layers:
            after = self.after.recall(active)[3]
            row["refined"] = {
                "trigger": trigger,
                "layers": [trigger + 1, self.config.layers - 1],
                "recall": _round(after[trigger + 1 :].mean()),
                "without": _round(recall[3][trigger + 1 :].mean()),
                "per_layer": [_round(value) for value in after[trigger:]],
            }
        return row


def _round(value: Any) -> float:
    return round(float(value), 4)


@functools.partial(jax.jit, static_argnames="config")
def _rollout_hits(
    config: PredictorConfig, weights: dict[str, Any], batch: Batch
) -> tuple[Float[Array, " H"], Float[Array, " H"]]:
    """Routed experts found among the K + 3 likeliest, and steps looked at, by how many steps ahead."""
    count, length = batch.valid.shape
    dtype = weights["in_proj"].dtype
    pad = ((0, 0), (0, HORIZON), (0, 0))
    target = jnp.pad(batch.target, pad)
    valid = jnp.pad(batch.valid, pad[:2])

    def at(t: Array, state: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
        blocks, found, seen = state
        now: Inputs = jax.tree.map(lambda array: array[:, t], batch.inputs)
        x, blocks = plain.trunk(config, weights, embed(config, weights, now, dtype), blocks)
        logits, _ = heads(config, weights, x)
        ahead = plain.rollout(config, weights, {"blocks": blocks, "logits": logits}, HORIZON)
        truth = jax.lax.dynamic_slice_in_dim(target, t, HORIZON, 1).reshape(ahead.shape) > 0
        mask = jax.lax.dynamic_slice_in_dim(valid, t, HORIZON, 1) & batch.scored[:, t, None]
        chosen = jax.lax.top_k(ahead, min(config.active + 3, config.experts))[1]
        right = jnp.take_along_axis(truth, chosen, axis=-1).sum((-1, -2)) * mask
        return blocks, found + right.sum(0).astype(jnp.float32), seen + mask.sum(0).astype(jnp.float32)

    blocks = plain.init_state(config, count, dtype)["blocks"]
    start = (blocks, jnp.zeros(HORIZON), jnp.zeros(HORIZON))
    _, found, seen = jax.lax.fori_loop(0, length, at, start)
    return found, seen


def table(predictors: Mapping[str, Row]) -> str:
    """The rows as text."""
    columns: list[str] = []
    for row in predictors.values():
        columns = list(row["recall_at"])
        break
    lines = [
        f"{'recall at top':32}" + "".join(f"{name:>8}" for name in columns) + "   8 ahead   short    long  refined"
    ]
    for name, row in predictors.items():
        ahead = row.get("rollout", [None])[-1]
        refine = row.get("refined", {}).get("recall")
        cells = [ahead, row.get("short"), row.get("long"), refine]
        tail = "".join(f"{'-' if value is None else format(value, '.4f'):>9}" for value in cells)
        lines.append(f"{name:32}" + "".join(f"{row['recall_at'][name_]:8.4f}" for name_ in columns) + tail)
    return "\n".join(lines)
