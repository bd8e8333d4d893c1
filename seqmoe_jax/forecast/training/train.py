"""Training: teacher forcing, then scheduled sampling; AdamW, moving average of weights, early stopping (paper 5.4).

One update is one jitted computation, batch cutting included; every rate is a traced value, so a sweep compiles once.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.data import Batch, Steps, sample
from seqmoe_jax.forecast.evaluation.metrics import graph_of, params_of
from seqmoe_jax.forecast.features import NO_TOKEN, activate
from seqmoe_jax.forecast.mamba2 import CONV
from seqmoe_jax.forecast.noise import Noise, Rates
from seqmoe_jax.forecast.predictor import Inputs, Outputs, Predictor, membership
from seqmoe_jax.forecast.training import losses

LEFT_FOR_RETENTION = 16  # steps that must follow a position before its future use is known well enough


class Recipe(NamedTuple):
    """Everything that may vary between runs without a new compilation."""

    updates: int | Array = 800
    rates: Rates = Rates()
    learning_rate: float | Array = 2e-3
    weight_decay: float | Array = 1.0
    flatten: float | Array = 0.5
    margin: float | Array = 1.0
    ranking: float | Array = 0.05
    membership: float | Array = 0.25
    retention: float | Array = 1.0
    refinement: float | Array = 1.0
    teaching: float | Array = 0.7  # weight of the teachers' forecasts, where there are teachers
    crop: float | Array = 0.5
    average: float | Array = 0.99  # of the weights' moving average, per update
    sampling: float | Array = 0.1  # share of positions where a span of own forecasts begins


class Plan(NamedTuple):
    """The static part: size of an update, how often to validate."""

    batch: int = 16
    window: int = 512
    every: int = 100  # updates between validations
    patience: int = 3  # validations without a better one before stopping
    warmup: int = 40
    bfloat16: bool = True


class State(NamedTuple):
    """What training carries: `average` is what is validated and kept."""

    params: Any
    average: Any
    moments: Any
    update: Int[Array, ""]


ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b1=0.9, b2=0.98))


def start(config: PredictorConfig, seed: int, weights: dict[str, Any] | None = None) -> State:
    """A fresh training state, from random weights or from given ones."""
    params = (
        nnx.state(Predictor(config, rngs=nnx.Rngs(seed)), nnx.Param) if weights is None else params_of(config, weights)
    )
    return State(params, jax.tree.map(jnp.copy, params), ADAM.init(params), jnp.zeros((), jnp.int32))


def weights_of(config: PredictorConfig, params: Any) -> dict[str, Any]:
    """The plain pytree of a state's `params` or `average`."""
    return nnx.merge(graph_of(config), params).weights()


@functools.partial(jax.jit, static_argnames=("config", "plan", "sampled"), donate_argnames=("state",))
def train_update(
    config: PredictorConfig,
    plan: Plan,
    sampled: bool,
    state: State,
    steps: Steps,
    recipe: Recipe,
    teachers: Any,
    key: Array,
) -> tuple[State, dict[str, Array]]:
    """One update.

    `teachers` is None or parameters stacked along a new first axis; `sampled` feeds own forecasts back.
    """
    key = jax.random.fold_in(key, state.update)
    batch = sample(steps, jax.random.fold_in(key, 0), plan.batch, plan.window, recipe.crop, config)
    gradient = jax.value_and_grad(total_loss, argnums=1, has_aux=True)
    (_, parts), grads = gradient(config, state.params, plan, sampled, batch, recipe, teachers, key)
    direction, moments = ADAM.update(grads, state.moments, state.params)
    rate = recipe.learning_rate * schedule(state.update, recipe.updates, plan.warmup)

    def move(param: Array, change: Array) -> Array:
        # Matrices decay; norms, biases, convolutions and time constants do not.
        decay = recipe.weight_decay if param.ndim == 2 and param.shape[0] > CONV else 0.0
        return param - rate * (change + decay * param)

    params = jax.tree.map(move, state.params, direction)
    keep = jnp.minimum(recipe.average, (1 + state.update) / (10 + state.update))
    average = jax.tree.map(lambda old, new: keep * old + (1 - keep) * new, state.average, params)
    return State(params, average, moments, state.update + 1), parts


def schedule(update: Int[Array, ""], updates: int | Array, warmup: int) -> Float[Array, ""]:
    """Linear warm-up, then a cosine to a hundredth."""
    done = jnp.clip((update - warmup) / jnp.maximum(updates - warmup, 1), 0, 1)
    cosine = 0.01 + 0.99 * 0.5 * (1 + jnp.cos(jnp.pi * done))
    return jnp.minimum((update + 1) / warmup, 1.0) * cosine


def total_loss(
    config: PredictorConfig,
    params: Any,
    plan: Plan,
    sampled: bool,
    batch: Batch,
    recipe: Recipe,
    teachers: Any,
    key: Array,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The weighted sum of all losses, and each of them."""
    dtype = jnp.bfloat16 if plan.bfloat16 else jnp.float32
    graph = graph_of(config)
    model: Predictor = nnx.merge(graph, params)
    count, length = batch.valid.shape
    target = batch.target.reshape(count, length, config.layers, config.experts)
    known, above = _known(config, batch, jax.random.fold_in(key, 1))
    inputs = batch.inputs
    if sampled:
        inputs = feed_back(config, model, batch, recipe.sampling, jax.random.fold_in(key, 2), dtype)
    outputs, _ = model(inputs, noise=Noise(jax.random.fold_in(key, 3), recipe.rates), dtype=dtype)
    refined = model.refine(outputs.hidden, outputs.next, known)

    valid = batch.valid.astype(jnp.float32)
    everywhere = jnp.broadcast_to(valid[..., None], target.shape[:-1])
    above = everywhere * above[:, None, :]
    flat, margin = recipe.flatten, recipe.margin

    routed = (target > 0).astype(jnp.float32)
    plain = model.weights()

    def fit(logits: Array, weight: Array, refined: bool) -> tuple[Array, Array, Array]:
        odds = membership(plain, logits, refined=refined)
        return (
            losses.weighted_mean(losses.divergence(logits, target, flat), weight),
            losses.weighted_mean(losses.cross_entropy(odds, routed).sum(-1), weight),
            losses.weighted_mean(losses.ranking(logits, target, config.active, margin), weight),
        )

    follow, member, rank = fit(outputs.next, everywhere, False)
    refine, refine_member, refine_rank = fit(refined, above, True)
    goal = losses.retention_target(
        batch.until.astype(jnp.float32), (batch.target > 0).astype(dtype), config.retention
    ).reshape(outputs.retention.shape)
    certain = valid * (batch.left > LEFT_FOR_RETENTION)
    kept = losses.weighted_mean(losses.cross_entropy(outputs.retention, goal).mean((-1, -2, -3)), certain)
    if teachers is not None:
        taught = jax.lax.stop_gradient(_teach(config, teachers, batch, known, dtype))
        weight = recipe.teaching
        follow = (1 - weight) * follow + weight * losses.weighted_mean(
            losses.divergence(outputs.next, taught[0]), everywhere
        )
        refine = (1 - weight) * refine + weight * losses.weighted_mean(losses.divergence(refined, taught[1]), above)
        soft = losses.cross_entropy(outputs.retention, taught[2]).mean((-1, -2, -3))
        kept = (1 - weight) * kept + weight * losses.weighted_mean(soft, certain)
    # Retention is a mean over E experts of small cross-entropies: times E it weighs what a layer's KL does.
    total = follow + recipe.membership * member + recipe.ranking * rank
    total += recipe.refinement * (refine + recipe.membership * refine_member + recipe.ranking * refine_rank)
    total += recipe.retention * kept * config.experts / 4
    parts = {"next": follow, "membership": member, "ranking": rank, "refined": refine, "retention": kept}
    return total, {"loss": total} | parts


def feed_back(
    config: PredictorConfig, model: Predictor, batch: Batch, rate: float | Array, key: Array, dtype: Any
) -> Inputs:
    """Scheduled sampling: in spans of up to 7 steps the inputs are the predictor's own forecasts, without tokens.

    This is what a rollout of 8 steps sees. Two passes stand for the recursion: forecasts within a span come from
    forecasts. Half of the sequences stay as they are, so that one-step forecasts lose nothing.
    """
    count, length = batch.valid.shape
    begin, size, half = jax.random.split(key, 3)
    begins = jax.random.bernoulli(begin, jnp.asarray(rate, jnp.float32), (count, length))
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
        probs = jax.nn.softmax(model(inputs, dtype=dtype)[0].next, axis=-1)
        forecast = activate(probs, config.active).reshape(batch.target.shape)
        shifted = jnp.pad(forecast, ((0, 0), (1, 0), (0, 0)))[:, :-1].astype(batch.target.dtype)
        inputs = inputs._replace(features=jnp.where(own[..., None], shifted, batch.inputs.features))
    return jax.tree.map(jax.lax.stop_gradient, inputs)


def _known(config: PredictorConfig, batch: Batch, key: Array) -> tuple[Array, Array]:
    """Routing below a trigger layer, L/2 for half of the sequences and any for the others; the layers from it on."""
    count = batch.valid.shape[0]
    anywhere, which = jax.random.split(key)
    trigger = jax.random.randint(anywhere, (count,), 1, max(config.layers, 2))
    trigger = jnp.where(jax.random.bernoulli(which, 0.5, (count,)), max(config.layers // 2, 1), trigger)
    below = jnp.arange(config.layers) < trigger[:, None]
    mask = jnp.repeat(below, config.experts, axis=1)
    return jnp.where(mask[:, None], batch.target, 0), (~below).astype(jnp.float32)


def _teach(
    config: PredictorConfig, teachers: Any, batch: Batch, known: Array, dtype: Any
) -> tuple[Array, Array, Array]:
    """Mean forecasts of several predictors, which see everything that the pupil has hidden from it."""

    def one(params: Any) -> tuple[Array, Array, Array]:
        teacher: Predictor = nnx.merge(graph_of(config), params)
        out: Outputs = teacher(batch.inputs, dtype=dtype)[0]
        refined = teacher.refine(out.hidden, out.next, known)
        return jax.nn.softmax(out.next), jax.nn.softmax(refined), jax.nn.sigmoid(out.retention)

    each = jax.lax.map(one, teachers)
    return each[0].mean(0), each[1].mean(0), each[2].mean(0)
