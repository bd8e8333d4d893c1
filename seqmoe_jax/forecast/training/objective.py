"""The training objective: teacher forcing, scheduled sampling, distillation (paper 5.4)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.data import Batch
from seqmoe_jax.forecast.features import NO_TOKEN, activate
from seqmoe_jax.forecast.heads import Inputs, membership
from seqmoe_jax.forecast.noise import Noise
from seqmoe_jax.forecast.predictor import Predictor, graph_of
from seqmoe_jax.forecast.training import losses
from seqmoe_jax.forecast.training.config import TrainConfig

LEFT_FOR_RETENTION = 16  # Positions that fewer steps follow do not count: their future use is not known well enough.


def total_loss(
    config: PredictorConfig, params: Any, training: TrainConfig, batch: Batch, teachers: Any, key: Array
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The weighted sum of all losses, and each of them; `params` and `teachers` as in `train_update`."""
    dtype = jnp.bfloat16 if training.bfloat16 else jnp.float32
    model: Predictor = nnx.merge(graph_of(config), params)
    count, length = batch.valid.shape
    target = batch.target.reshape(count, length, config.layers, config.experts)
    known, above = _known(config, batch, jax.random.fold_in(key, 1))
    inputs = batch.inputs
    if training.sampling > 0:
        inputs = feed_back(config, model, batch, training.sampling, jax.random.fold_in(key, 2), dtype)
    outputs = model(inputs, noise=Noise(jax.random.fold_in(key, 3), training.noise), dtype=dtype)
    refined = model.refine(outputs.hidden, outputs.next, known)

    valid = batch.valid.astype(jnp.float32)
    everywhere = jnp.broadcast_to(valid[..., None], target.shape[:-1])
    above = everywhere * above[:, None, :]
    routed = (target > 0).astype(jnp.float32)
    plain = model.weights()

    def fit(logits: Array, weight: Array, refined: bool) -> tuple[Array, Array, Array]:
        odds = membership(plain, logits, refined=refined)
        return (
            losses.weighted_mean(losses.divergence(logits, target, training.flatten), weight),
            losses.weighted_mean(losses.cross_entropy(odds, routed).sum(-1), weight),
            losses.weighted_mean(losses.ranking(logits, target, config.active, training.margin), weight),
        )

    follow, member, rank = fit(outputs.next, everywhere, False)
    refine, refine_member, refine_rank = fit(refined, above, True)
    goal = losses.retention_target(batch.until.astype(jnp.float32), config.discount).reshape(target.shape)
    certain = valid * (batch.left > LEFT_FOR_RETENTION)
    kept = losses.weighted_mean(losses.cross_entropy(outputs.retention, goal).mean((-1, -2)), certain)
    if teachers is not None:
        taught = jax.lax.stop_gradient(_teach(config, teachers, batch, known, dtype))
        weight = training.teaching
        follow = (1 - weight) * follow + weight * losses.weighted_mean(
            losses.divergence(outputs.next, taught[0]), everywhere
        )
        refine = (1 - weight) * refine + weight * losses.weighted_mean(losses.divergence(refined, taught[1]), above)
        soft = losses.cross_entropy(outputs.retention, taught[2]).mean((-1, -2))
        kept = (1 - weight) * kept + weight * losses.weighted_mean(soft, certain)
    # Retention is a mean over E experts of small cross-entropies. Times E / 4 it weighs as much as the KL of a layer.
    total = follow + training.membership * member + training.ranking * rank
    total += refine + training.membership * refine_member + training.ranking * refine_rank
    total += kept * config.experts / 4
    parts = {"next": follow, "membership": member, "ranking": rank, "refined": refine, "retention": kept}
    return total, {"loss": total} | parts


def feed_back(config: PredictorConfig, model: Predictor, batch: Batch, rate: float, key: Array, dtype: Any) -> Inputs:
    """Scheduled sampling: in spans of up to 7 steps the inputs are the predictor's own forecasts, without tokens.

    A rollout of 8 steps reads such inputs. The recursion is approximated by two passes: the second reads, within a
    span, forecasts that the first made. Half of the sequences stay as they are, so that one-step forecasts
    lose nothing.
    """
    count, length = batch.valid.shape
    begin, size, half = jax.random.split(key, 3)
    begins = jax.random.bernoulli(begin, rate, (count, length))
    begins &= jax.random.bernoulli(half, 0.5, (count, 1))
    position = jnp.arange(length)
    stop = jnp.where(begins, position + jax.random.randint(size, (count, length), 1, 8), 0)
    own = (jax.lax.cummax(stop, axis=1) > position) & (position > 0)
    inputs = batch.inputs
    if inputs.rows is not None:
        inputs = inputs._replace(rows=jnp.where(own, NO_TOKEN, inputs.rows))
    if inputs.echo is not None:
        inputs = inputs._replace(echo=jnp.where(own[..., None], 0, inputs.echo))
    for _ in range(2):
        probs = jax.nn.softmax(model(inputs, dtype=dtype).next, axis=-1)
        forecast = activate(probs, config.active).reshape(batch.target.shape)
        shifted = jnp.pad(forecast, ((0, 0), (1, 0), (0, 0)))[:, :-1].astype(batch.target.dtype)
        inputs = inputs._replace(features=jnp.where(own[..., None], shifted, batch.inputs.features))
    stopped: Inputs = jax.tree.map(jax.lax.stop_gradient, inputs)
    return stopped


def _known(config: PredictorConfig, batch: Batch, key: Array) -> tuple[Float[Array, "B T keys"], Float[Array, "B L"]]:
    """Routing below a trigger layer, and which layers are not below it.

    The trigger layer is L/2 for half of the sequences and a random one for the others.
    """
    count = batch.valid.shape[0]
    anywhere, which = jax.random.split(key)
    trigger = jax.random.randint(anywhere, (count,), 1, max(config.layers, 2))
    trigger = jnp.where(jax.random.bernoulli(which, 0.5, (count,)), max(config.layers // 2, 1), trigger)
    below = jnp.arange(config.layers) < trigger[:, None]
    mask = jnp.repeat(below, config.experts, axis=1)
    return jnp.where(mask[:, None], batch.target, 0), (~below).astype(jnp.float32)


def _teach(
    config: PredictorConfig, teachers: Any, batch: Batch, known: Float[Array, "B T keys"], dtype: Any
) -> tuple[Float[Array, "B T L E"], Float[Array, "B T L E"], Float[Array, "B T L E"]]:
    """Mean forecasts of several predictors, which read what is hidden from the one in training."""

    def one(params: Any) -> tuple[Array, Array, Array]:
        teacher: Predictor = nnx.merge(graph_of(config), params)
        out = teacher(batch.inputs, dtype=dtype)
        refined = teacher.refine(out.hidden, out.next, known)
        return jax.nn.softmax(out.next), jax.nn.softmax(refined), jax.nn.sigmoid(out.retention)

    each = jax.lax.map(one, teachers)
    return each[0].mean(0), each[1].mean(0), each[2].mean(0)
