"""Regularisation of the predictor: rates are traced values, so that a sweep over them compiles once."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from seqmoe_jax.forecast.features import FIRST_ROW, NO_TOKEN


class Rates(NamedTuple):
    """Probabilities of hiding: activations inside the network, single experts and whole layers of the features,
    tokens (the step then has none), a token's identity (it then looks like one never seen), echoes."""

    dropout: float | Array = 0.1
    feature: float | Array = 0.05
    layer: float | Array = 0.05
    token: float | Array = 0.02
    unseen: float | Array = 0.08
    echo: float | Array = 0.1


class Noise(NamedTuple):
    """Rates and the key that this update's noise comes from."""

    key: Array
    rate: Rates

    def fold(self, index: int) -> Array:
        return jax.random.fold_in(self.key, index)


def drop(x: Float[Array, "*B D"], rate: float | Array, key: Array, *, rescale: bool = True) -> Float[Array, "*B D"]:
    """Sets elements to zero with probability `rate`; `rescale` keeps the mean."""
    kept = jax.random.bernoulli(key, 1 - jnp.asarray(rate, jnp.float32), x.shape)
    scale = 1 / (1 - jnp.asarray(rate, jnp.float32)) if rescale else jnp.ones(())
    return jnp.where(kept, x * scale.astype(x.dtype), 0)


def drop_layers(x: Float[Array, "*B keys"], layers: int, rate: float | Array, key: Array) -> Float[Array, "*B keys"]:
    """Hides the routing of whole layers."""
    kept = jax.random.bernoulli(key, 1 - jnp.asarray(rate, jnp.float32), (*x.shape[:-1], layers, 1))
    return (x.reshape(*x.shape[:-1], layers, -1) * kept.astype(x.dtype)).reshape(x.shape)


def drop_rows(rows: Int[Array, "*B"], rate: float | Array, unseen: float | Array, key: Array) -> Int[Array, "*B"]:
    """Replaces token rows: by none with probability `rate`, by a shared row of unseen tokens with `unseen`."""
    chance = jax.random.uniform(key, rows.shape)
    shared = 1 + rows % (FIRST_ROW - 1)
    rows = jnp.where(chance < jnp.asarray(rate) + jnp.asarray(unseen), shared, rows)
    return jnp.where(chance < jnp.asarray(rate), NO_TOKEN, rows)
