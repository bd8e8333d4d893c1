"""Hyper-connections are what their formula says, and their matrix between streams is doubly stochastic."""

import jax
import jax.numpy as jnp
import numpy as np

from seqmoe_jax.models.residual import HyperConnection, HyperHead, HyperWeights

STREAMS, HIDDEN, EPS = 4, 24, 1e-6
SPEC = HyperConnection(streams=STREAMS, iterations=20, eps=EPS, norm_eps=EPS)


def random_weights(rows, scales):
    rng = np.random.default_rng(0)
    return HyperWeights(
        map=jnp.asarray(rng.standard_normal((rows, STREAMS * HIDDEN)) * (STREAMS * HIDDEN) ** -0.5, jnp.float32),
        base=jnp.asarray(rng.standard_normal(rows) * 0.7, jnp.float32),
        scale=jnp.asarray(1 + 0.3 * rng.standard_normal(scales), jnp.float32),
    )


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_a_half_of_a_layer_is_the_formula():
    weights, rng = random_weights(STREAMS * (2 + STREAMS), 3), np.random.default_rng(1)
    x = rng.standard_normal((2, 3, STREAMS, HIDDEN)).astype(np.float32)
    y, mixing = jax.jit(SPEC.enter)(jnp.asarray(x), weights)
    result = rng.standard_normal((2, 3, HIDDEN)).astype(np.float32)
    after = jax.jit(SPEC.leave)(jnp.asarray(x), jnp.asarray(result), mixing)
    w = HyperWeights(*(np.asarray(value, np.float64) for value in weights))
    for at in np.ndindex(2, 3):
        flat = x[at].ravel().astype(np.float64)
        m = w.map @ (flat / np.sqrt((flat * flat).mean() + EPS))
        pre = sigmoid(m[:4] * w.scale[0] + w.base[:4]) + EPS
        post = 2 * sigmoid(m[4:8] * w.scale[1] + w.base[4:8])
        c = np.exp((m[8:] * w.scale[2] + w.base[8:]).reshape(4, 4))
        c = c / c.sum(1, keepdims=True) + EPS
        c /= c.sum(0, keepdims=True) + EPS
        for _ in range(19):
            c /= c.sum(1, keepdims=True) + EPS
            c /= c.sum(0, keepdims=True) + EPS
        np.testing.assert_allclose(y[at], pre @ x[at], atol=1e-5)
        np.testing.assert_allclose(after[at], post[:, None] * result[at] + c.T @ x[at], atol=1e-5)


def test_the_matrix_between_streams_is_doubly_stochastic():
    weights = random_weights(STREAMS * (2 + STREAMS), 3)
    _, mixing = jax.jit(SPEC.enter)(jax.random.normal(jax.random.key(0), (1, 64, STREAMS, HIDDEN)), weights)
    for axis in (-1, -2):
        np.testing.assert_allclose(mixing.streams.sum(axis=axis), 1, atol=1e-3)


def test_the_head_weighs_streams():
    weights = random_weights(STREAMS, 1)
    x = np.random.default_rng(2).standard_normal((1, 2, STREAMS, HIDDEN)).astype(np.float32)
    head = HyperHead(streams=STREAMS, eps=EPS, norm_eps=EPS)
    out = head(jnp.asarray(x), weights)
    for t in range(2):
        flat = x[0, t].ravel()
        m = np.asarray(weights.map) @ (flat / np.sqrt((flat * flat).mean() + EPS))
        gates = sigmoid(m * np.asarray(weights.scale) + np.asarray(weights.base)) + EPS
        np.testing.assert_allclose(out[0, t], gates @ x[0, t], atol=1e-5)
