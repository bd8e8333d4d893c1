"""One update of the predictor: AdamW and a moving average of the weights (paper 5.4), as one jitted computation."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.data import Steps, sample
from seqmoe_jax.forecast.predictor import Predictor, params_of
from seqmoe_jax.forecast.training.config import TrainConfig, optimizer
from seqmoe_jax.forecast.training.objective import total_loss


class TrainState(NamedTuple):
    """What training carries from update to update; `average` is what is validated and kept."""

    params: Any
    average: Any
    optimizer: optax.OptState
    update: Int[Array, ""]


def start(
    config: PredictorConfig, training: TrainConfig, seed: int, weights: dict[str, Any] | None = None
) -> TrainState:
    """A fresh training state, from random weights or from given ones."""
    params = (
        nnx.state(Predictor(config, rngs=nnx.Rngs(seed)), nnx.Param) if weights is None else params_of(config, weights)
    )
    average = jax.tree.map(jnp.copy, params)
    return TrainState(params, average, optimizer(training).init(params), jnp.zeros((), jnp.int32))


@functools.partial(jax.jit, static_argnames=("config", "training"), donate_argnames=("state",))
def train_update(
    config: PredictorConfig, training: TrainConfig, state: TrainState, steps: Steps, teachers: Any, key: Array
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
    """The state after an update, and the losses; `teachers` is None or parameters stacked along a new first axis."""
    key = jax.random.fold_in(key, state.update)
    batch = sample(steps, jax.random.fold_in(key, 0), training.batch, training.window, training.crop, config)
    gradient = jax.grad(total_loss, argnums=1, has_aux=True)
    grads, parts = gradient(config, state.params, training, batch, teachers, key)
    changes, moments = optimizer(training).update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, changes)
    # The average forgets faster at first, so that the random beginning does not weigh.
    decay = jnp.minimum(training.ema_decay, (1 + state.update) / (10 + state.update))
    average = optax.incremental_update(params, state.average, 1 - decay)
    return TrainState(params, average, moments, state.update + 1), parts
