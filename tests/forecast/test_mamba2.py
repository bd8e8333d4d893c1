"""The chunked form, the recurrent form and an independent NumPy implementation are one function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmoe_jax.errors import PredictorError
from seqmoe_jax.forecast.mamba2 import Mamba2, Mamba2Config, block_step, init_state
from seqmoe_jax.forecast.ssd import ssd_chunked, ssd_step
from tests.forecast import numpy_mamba2

CONFIG = Mamba2Config(d_model=12, expand=2, head_dim=8, d_state=5)


@pytest.fixture(scope="module")
def model():
    return Mamba2(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def chunked(model):
    return jax.jit(model.chunked)


def sequence(steps, batch=2):
    return jax.random.normal(jax.random.key(1), (batch, steps, CONFIG.d_model))


@pytest.mark.parametrize("steps", [1, 7, 150])
def test_chunked_equals_numpy(model, chunked, steps):
    x = sequence(steps)
    got, _ = chunked(x)
    sizes = {"d_inner": CONFIG.d_inner, "num_heads": CONFIG.num_heads, "d_state": CONFIG.d_state}
    want = np.stack([numpy_mamba2.block(model.weights(), row, **sizes) for row in x])
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_recurrent_equals_chunked_and_goes_on_from_its_state(model, chunked):
    x = sequence(40)
    want, _ = chunked(x)
    _, state = chunked(x[:, :23])
    weights = model.weights()
    step = jax.jit(lambda x, state: block_step(weights, x, state, CONFIG))
    for t in range(23, 40):
        got, state = step(x[:, t], state)
        np.testing.assert_allclose(got, want[:, t], rtol=1e-4, atol=1e-4)


def test_state_after_a_short_sequence_of_a_batch(chunked):
    x = sequence(20)
    valid = jnp.arange(20) < jnp.array([[20], [9]])
    _, state = chunked(x, valid)
    _, alone = chunked(x[1:, :9])
    np.testing.assert_allclose(state["ssm"][1], alone["ssm"][0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state["conv"][1], alone["conv"][0], rtol=1e-5)


def test_state_before_any_step_is_that_of_an_empty_past(model, chunked):
    x = sequence(1)
    got, _ = jax.jit(block_step, static_argnums=3)(model.weights(), x[:, 0], init_state(CONFIG, 2), CONFIG)
    np.testing.assert_allclose(got, chunked(x)[0][:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [16, 100])
def test_any_chunk_length_and_a_starting_state(chunk):
    keys = jax.random.split(jax.random.key(3), 5)
    x = jax.random.normal(keys[0], (1, 37, 2, 3))
    dt = jax.nn.softplus(jax.random.normal(keys[1], (1, 37, 2)))
    b, c = jax.random.normal(keys[2], (1, 37, 4)), jax.random.normal(keys[3], (1, 37, 4))
    state = jax.random.normal(keys[4], (1, 2, 3, 4))
    A = -jnp.array([0.5, 2.0])
    got, final = jax.jit(ssd_chunked, static_argnames="chunk")(x, dt, A, b, c, state, chunk=chunk)
    step = jax.jit(ssd_step)
    for t in range(37):
        want, state = step(x[:, t], dt[:, t], A, b[:, t], c[:, t], state)
        np.testing.assert_allclose(got[:, t], want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(final, state, rtol=1e-4, atol=1e-4)


def test_width_must_fit_the_heads():
    with pytest.raises(PredictorError, match="multiple of head_dim 64"):
        Mamba2Config(d_model=48, expand=1)
