"""The decode step's predictor equals the trained module; rollouts leave no trace; echoes are found as in training."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmoe_jax.forecast import forecaster, inference
from seqmoe_jax.forecast.by_rows import ByRows, by_rows
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.data import prepare, window
from seqmoe_jax.forecast.evaluation.metrics import forecast, refined
from seqmoe_jax.forecast.features import activate, token_table
from seqmoe_jax.forecast.heads import membership
from seqmoe_jax.forecast.predictor import Predictor, graph_of, params_of
from tests.forecast.traces import random_trace

TRACE = random_trace(lengths=(30, 17), layers=3, experts=6, active=2, vocabulary=11)
STEP = jax.jit(inference.step, static_argnums=0)
TABLE = token_table(TRACE.tok[:20], 11)


def make(inputs, echo=8):
    config = PredictorConfig(
        model="m", layers=3, experts=6, active=2, inputs=inputs, d_model=16, expand=2, head_dim=8, d_state=4,
        vocabulary=11, token_rows=int(TABLE.max()) + 1, token_width=4, echo=echo, refine_width=8,
    )  # fmt: skip
    weights = Predictor(config, rngs=nnx.Rngs(0)).weights() | {"token_table": jnp.asarray(TABLE)}
    return config, weights


def test_weights_stored_by_rows_forecast_the_same():
    config, weights = make("activations+token")
    stored = by_rows(weights)
    assert isinstance(stored["blocks"][0]["in_proj"], ByRows)
    state = inference.init_state(config, 2)
    features = jax.random.uniform(jax.random.key(1), (2, config.keys))
    tokens = jnp.array([3, -1])
    ours, expected = STEP(config, stored, state, features, tokens), STEP(config, weights, state, features, tokens)
    ours += (inference.refine(config, stored, ours[0], features), inference.rollout(config, stored, ours[0], 3))
    expected += (inference.refine(config, weights, expected[0], features),)
    expected += (inference.rollout(config, weights, expected[0], 3),)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=1e-5)


@pytest.mark.parametrize(("inputs", "echo"), [("activations", 0), ("activations+token", 0), ("activations+token", 8)])
def test_one_step_at_a_time_equals_the_module_on_whole_sequences(inputs, echo):
    config, weights = make(inputs, echo)
    steps = prepare(TRACE, config, TABLE)
    batch = window(steps, steps.starts, steps.ends, 30, config)
    params = params_of(config, weights)
    outputs = forecast(config, params, batch)
    again = refined(config, params, batch, outputs, 1)
    known = np.where(np.arange(config.keys) < 6, batch.target, 0)
    odds = jax.nn.sigmoid(membership(weights, outputs.next))
    refined_odds = jax.nn.sigmoid(membership(weights, again, refined=True))
    kept = jax.nn.sigmoid(outputs.retention)
    tokens = np.full((2, 30), -1, np.int32)
    tokens[0], tokens[1, :17] = TRACE.tok[:30], TRACE.tok[30:]
    refine = jax.jit(inference.refine, static_argnums=0)
    state = inference.init_state(config, 2)
    for t in range(30):
        rows = np.array([t < 30, t < 17])
        state, following, retention = STEP(
            config, weights, state, batch.inputs.features[:, t], jnp.asarray(tokens[:, t])
        )
        np.testing.assert_allclose(following[rows], odds[rows, t], rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(retention[rows], kept[rows, t], rtol=2e-4, atol=2e-5)
        after = refine(config, weights, state, known[:, t])
        np.testing.assert_allclose(after[rows], refined_odds[rows, t], rtol=2e-4, atol=2e-5)


def test_rollout_starts_with_the_one_step_forecast_and_feeds_itself_back():
    config, weights = make("activations+token")
    features = jnp.abs(jax.random.normal(jax.random.key(0), (2, 18)))
    state, following, _ = jax.jit(inference.step, static_argnums=0)(
        config, weights, inference.init_state(config, 2), features, jnp.array([1, 2])
    )
    before = jax.tree.map(np.asarray, state)
    ahead = jax.jit(inference.rollout, static_argnums=(0, 3))(config, weights, state, 3)
    assert ahead.shape == (2, 3, 3, 6)
    np.testing.assert_allclose(ahead[:, 0], following, rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, state))
    # By hand: the forecast as the next step's routing, of a token that is not known.
    fed = activate(jax.nn.softmax(state["logits"]), 2).reshape(2, 18)
    _, second, _ = STEP(config, weights, state, fed, jnp.array([-1, -1]))
    np.testing.assert_allclose(ahead[:, 1], second, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ahead", [1, 2])
def test_plans_are_by_the_rollout_of_the_step_they_are_for(ahead):
    config, weights = make("activations+token")
    state, tokens = inference.init_state(config, 3), jnp.array([1, 2, 3])
    routing, active = jax.random.uniform(jax.random.key(0), (3, config.keys)), jnp.array([True, False, True])
    after, forecast, chance = jax.jit(forecaster.foresee, static_argnums=0, static_argnames="ahead")(
        config, weights, state, routing, tokens, active, ahead=ahead
    )
    expected, following, _ = STEP(config, weights, state, routing, tokens)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), after, expected)
    np.testing.assert_allclose(forecast.probability.reshape(3, 6), following[jnp.array([0, 2])].mean(0), rtol=1e-5)
    rolled = inference.rollout(config, weights, expected, ahead)[jnp.array([0, 2])].mean(0)
    np.testing.assert_allclose(chance, rolled[ahead - 1], rtol=1e-4)


def test_the_graph_is_made_without_weights():
    config, _ = make("activations")
    assert graph_of(config) is graph_of(config)


@pytest.mark.parametrize(("experts", "active"), [(6, 2), (32, 4), (128, 8), (4, 4)])
def test_odds_begin_where_knowing_nothing_means_k_of_e(experts, active):
    sizes = {"layers": 2, "experts": experts, "active": active, "d_model": 16, "head_dim": 8, "blocks": 1}
    config = PredictorConfig(model="m", **sizes, inputs="activations")
    weights = Predictor(config, rngs=nnx.Rngs(0)).weights()
    sums = jax.nn.sigmoid(membership(weights, jnp.zeros((2, experts)))).sum(-1)
    np.testing.assert_allclose(sums, min(active, 0.9 * experts), rtol=1e-4)


def test_prefill_is_as_many_steps():
    """In chunks, on rows of different lengths, with a memory that is shorter than they are."""
    config, weights = make("activations+token", echo=8)
    steps = prepare(TRACE, config, TABLE)
    features = window(steps, steps.starts, steps.ends, 30, config).inputs.features
    tokens = np.full((2, 30), 3, np.int32)
    tokens[0], tokens[1, :17] = TRACE.tok[:30], TRACE.tok[30:]
    lengths = np.array([30, 17])
    state = inference.init_state(config, 2)
    wanted = [state, state]
    for t in range(30):
        state, *_ = STEP(config, weights, state, features[:, t], jnp.asarray(tokens[:, t]))
        for row in np.flatnonzero(lengths == t + 1):
            wanted[row] = state
    prefill = jax.jit(inference.prefill, static_argnums=0)
    got = inference.init_state(config, 2)
    for start in range(0, 30, 10):
        span = slice(start, start + 10)
        valid = jnp.asarray(np.arange(30)[span] < lengths[:, None])
        got = prefill(config, weights, got, features[:, span], jnp.asarray(tokens[:, span]), valid)
    for row in range(2):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a[row], b[row], atol=1e-4), got, wanted[row])  # noqa: B023
