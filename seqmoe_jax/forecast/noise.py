"""Regularisation of the predictor in training: dropout, and inputs that are hidden at random."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.features import FIRST_ROW, NO_TOKEN
from seqmoe_jax.forecast.heads import Inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseRates:
    """Probabilities of hiding: activations inside the network (`dropout`), single experts (`feature`) and whole layers
    (`layer`) of the features, tokens (`token`: the step then has none), the identity of a token (`unseen`: it then
    looks like one that training never saw), echoes."""

    dropout: float = 0.1
    feature: float = 0.05
    layer: float = 0.05
    token: float = 0.02
    unseen: float = 0.08
    echo: float = 0.1


class Noise(NamedTuple):
    """The rates, and the key that the noise of one update comes from."""

    key: Array
    rate: NoiseRates

    def fold(self, index: int) -> Array:
        return jax.random.fold_in(self.key, index)


def regularise(config: PredictorConfig, inputs: Inputs, noise: Noise) -> Inputs:
    """The inputs with single experts and whole layers of the features, tokens and echoes hidden at random."""
    rate = noise.rate
    features = drop_layers(inputs.features, config.layers, rate.layer, noise.fold(101))
    features = drop(features, rate.feature, noise.fold(102), rescale=False)
    rows, echo = inputs.rows, inputs.echo
    if rows is not None:
        rows = drop_rows(rows, rate.token, rate.unseen, noise.fold(103))
    if echo is not None:
        echo = echo * jax.random.bernoulli(noise.fold(104), 1 - rate.echo, (*echo.shape[:-1], 1)).astype(echo.dtype)
        echo = drop_layers(echo, config.layers, rate.layer, noise.fold(105))
    return Inputs(features, rows, echo)


def drop(x: Float[Array, "*B D"], rate: float, key: Array, *, rescale: bool = True) -> Float[Array, "*B D"]:
    """Sets elements to zero with probability `rate`; `rescale` keeps the mean."""
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate) if rescale else x, 0)


def drop_layers(x: Float[Array, "*B keys"], layers: int, rate: float, key: Array) -> Float[Array, "*B keys"]:
    """Hides the routing of whole layers."""
    kept = jax.random.bernoulli(key, 1 - rate, (*x.shape[:-1], layers, 1))
    return (x.reshape(*x.shape[:-1], layers, -1) * kept.astype(x.dtype)).reshape(x.shape)


def drop_rows(rows: Int[Array, "*B"], rate: float, unseen: float, key: Array) -> Int[Array, "*B"]:
    """Replaces token rows by none with probability `rate`, and by a shared row of unseen tokens with `unseen`."""
    chance = jax.random.uniform(key, rows.shape)
    shared = 1 + rows % (FIRST_ROW - 1)
    rows = jnp.where(chance < rate + unseen, shared, rows)
    return jnp.where(chance < rate, NO_TOKEN, rows)
