"""The recall table: a predictor and the baselines, one step and rollouts of 1 to 8, per layer, short and long."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from seqmoe_jax.forecast import inference
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.data import Batch, Steps, batches, prepare
from seqmoe_jax.forecast.evaluation.baselines import Scores, baselines
from seqmoe_jax.forecast.evaluation.metrics import TOP, Hits, add_hits, forecast, no_hits, refined
from seqmoe_jax.forecast.heads import Inputs, embed, heads
from seqmoe_jax.forecast.predictor import params_of
from seqmoe_jax.traces.format import Trace

HORIZON = 8
LONG = 256  # steps from which a sequence counts as long

Row = dict[str, Any]


def recall_rows(
    fitted: Trace,
    held: Trace,
    predictor: tuple[PredictorConfig, dict[str, Any]] | None,
    *,
    trigger: int | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Row]:
    """Rows of the recall table on `held`: the baselines, fitted on `fitted`, and a predictor as `store.load` gives it.

    `trigger` is the layer of the mid-step refinement (default: L/2).
    """
    sizes = {"layers": held.layers, "experts": held.num_experts, "active": held.active}
    bare = PredictorConfig(model="", **sizes, inputs="activations")
    steps = prepare(held, bare, None)
    rows = {}
    for name, scores in baselines(fitted).items():
        log(f"evaluating {name} on {int(held.decoded().sum())} steps")
        rows[name] = evaluate_baseline(bare, scores, steps)
    if predictor is not None:
        config, weights = predictor
        log(f"evaluating the predictor ({config.inputs})")
        steps = prepare(held, config, weights.get("token_table"))
        rows[config.inputs] = evaluate_predictor(config, weights, steps, trigger=trigger)
    return rows


def evaluate_predictor(
    config: PredictorConfig, weights: dict[str, Any], steps: Steps, *, trigger: int | None = None
) -> Row:
    """The row of a predictor, whose weights are a plain pytree."""
    trigger = config.layers // 2 if trigger is None else trigger
    params = params_of(config, weights)
    counts = _Counts(config)
    for batch in batches(steps, config):
        outputs = forecast(config, params, batch)
        counts.add(outputs.next, batch)
        counts.add_refined(refined(config, params, batch, outputs, trigger), batch)
        counts.add_rollout(*_rollout_hits(config, weights, batch))
    return counts.row(trigger)


def evaluate_baseline(config: PredictorConfig, scores: Scores, steps: Steps) -> Row:
    """The row of a baseline; of `config` only L, E and K matter."""
    counts = _Counts(config)
    for batch in batches(steps, config):
        counts.add(scores(batch.inputs.features, 1), batch)
        found, count = np.zeros(HORIZON), np.zeros(HORIZON)
        for ahead in range(1, HORIZON + 1):
            later = scores(batch.inputs.features[:, : batch.valid.shape[1] - ahead + 1], ahead)
            # The last known step is the one before the position, so position t + ahead - 1 is `ahead` steps on.
            mask = batch.scored[:, : later.shape[1]] & batch.valid[:, ahead - 1 :]
            hits = add_hits(no_hits(config), later, batch.target[:, ahead - 1 :], mask, config.active)
            found[ahead - 1], count[ahead - 1] = float(hits.found[TOP].sum()), float(hits.steps)
        counts.add_rollout(found, count)
    return counts.row(None)


class _Counts:
    """Counts of one row, summed over batches: of all sequences, of long ones, once refined, and by steps ahead."""

    def __init__(self, config: PredictorConfig):
        self.config = config
        self.all = self.long = self.refined = no_hits(config)
        self.found, self.count = np.zeros(HORIZON), np.zeros(HORIZON)

    def add(self, scores: Float[Array, "B T L E"], batch: Batch) -> None:
        long = batch.scored & (batch.valid.sum(1, keepdims=True) >= LONG)
        self.all = add_hits(self.all, scores, batch.target, batch.scored, self.config.active)
        self.long = add_hits(self.long, scores, batch.target, long, self.config.active)

    def add_refined(self, scores: Float[Array, "B T L E"], batch: Batch) -> None:
        self.refined = add_hits(self.refined, scores, batch.target, batch.scored, self.config.active)

    def add_rollout(self, found: Any, count: Any) -> None:
        self.found, self.count = self.found + np.asarray(found), self.count + np.asarray(count)

    def row(self, trigger: int | None) -> Row:
        """Recalls; `trigger` is the layer of the refinement, if there was one."""
        active, layers = self.config.active, self.config.layers
        recall = self.all.recall(active)
        short = Hits(self.all.found - self.long.found, self.all.steps - self.long.steps)
        row: Row = {
            "recall_at": {str(active + extra): _round(recall[extra].mean()) for extra in range(len(recall))},
            "per_layer": [_round(value) for value in recall[TOP]],
            "short": _round(short.recall(active)[TOP].mean()) if float(short.steps) else None,
            "long": _round(self.long.recall(active)[TOP].mean()) if float(self.long.steps) else None,
            "long_from": LONG,
            "steps": int(self.all.steps),
            "rollout": [_round(value) for value in self.found / np.maximum(self.count * active * layers, 1)],
        }
        if trigger is not None and trigger + 1 < layers:
            refined = self.refined.recall(active)[TOP]
            row["refined"] = {
                "trigger": trigger,
                "layers": [trigger + 1, layers - 1],
                "recall": _round(refined[trigger + 1 :].mean()),
                "without": _round(recall[TOP][trigger + 1 :].mean()),
                "per_layer": [_round(value) for value in refined[trigger:]],
            }
        return row


def _round(value: Any) -> float:
    return round(float(value), 4)


@functools.partial(jax.jit, static_argnames="config")
def _rollout_hits(
    config: PredictorConfig, weights: dict[str, Any], batch: Batch
) -> tuple[Float[Array, " C"], Float[Array, " C"]]:
    """Routed experts found among the K + 3 likeliest, and steps looked at, by how many of C steps ahead."""
    count, length = batch.valid.shape
    dtype = weights["in_proj"].dtype
    pad = ((0, 0), (0, HORIZON), (0, 0))
    target = jnp.pad(batch.target, pad)
    valid = jnp.pad(batch.valid, pad[:2])

    def at(t: Array, state: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
        blocks, found, seen = state
        now: Inputs = jax.tree.map(lambda array: array[:, t], batch.inputs)
        x, blocks = inference.trunk(config, weights, embed(config, weights, now, dtype), blocks)
        logits, _ = heads(config, weights, x)
        ahead = inference.rollout(config, weights, {"blocks": blocks, "logits": logits}, HORIZON)
        truth = jax.lax.dynamic_slice_in_dim(target, t, HORIZON, 1).reshape(ahead.shape) > 0
        mask = jax.lax.dynamic_slice_in_dim(valid, t, HORIZON, 1) & batch.scored[:, t, None]
        chosen = jax.lax.top_k(ahead, min(config.active + 3, config.experts))[1]
        right = jnp.take_along_axis(truth, chosen, axis=-1).sum((-1, -2)) * mask
        return blocks, found + right.sum(0).astype(jnp.float32), seen + mask.sum(0).astype(jnp.float32)

    blocks = inference.init_state(config, count, dtype)["blocks"]
    start = (blocks, jnp.zeros(HORIZON), jnp.zeros(HORIZON))
    _, found, seen = jax.lax.fori_loop(0, length, at, start)
    return found, seen


def table(rows: Mapping[str, Row]) -> str:
    """The rows as text."""
    columns = list(next(iter(rows.values()))["recall_at"])
    head = "".join(f"{name:>8}" for name in columns)
    lines = [f"{'recall at top':32}{head}   8 ahead   short    long  refined"]
    for name, row in rows.items():
        cells = [row["rollout"][-1], row["short"], row["long"], row.get("refined", {}).get("recall")]
        recalls = "".join(f"{row['recall_at'][column]:8.4f}" for column in columns)
        tail = "".join(f"{'-' if value is None else format(value, '.4f'):>9}" for value in cells)
        lines.append(f"{name:32}{recalls}{tail}")
    return "\n".join(lines)
