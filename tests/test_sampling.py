"""Sampling draws from the distribution that the options describe."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmoe_jax.errors import ConfigError
from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.sampling import SamplingParams, filter_logits, greedy, mask_padding, sample

VOCAB = 12


def kept(logits, **options) -> list[int]:
    params = SamplingParams.of([SamplingConfig(temperature=1.0, **options)], 1)
    return np.flatnonzero(
        np.isfinite(np.asarray(filter_logits(jnp.asarray([logits], jnp.float32), params))[0])
    ).tolist()


def expected(logits, top_k, top_p, min_p) -> list[int]:
    """The filters one after another, in plain NumPy."""
    p = np.exp(np.asarray(logits, np.float64) - max(logits))
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    alive = order[: top_k or len(p)]
    q = p[alive] / p[alive].sum()
    count = int(np.searchsorted(np.cumsum(q), top_p - 1e-9) + 1)
    alive = alive[: max(1, count)]
    return sorted(i for i in alive if p[i] >= min_p * p.max() * (1 - 1e-6))


@given(
    st.permutations(range(VOCAB)),
    st.integers(0, VOCAB),
    st.sampled_from([0.1, 0.35, 0.5, 0.8, 0.97, 1.0]),
    st.sampled_from([0.0, 0.05, 0.3]),
)
@settings(deadline=None, max_examples=60)
def test_filters_keep_what_their_definitions_keep(order, top_k, top_p, min_p):
    logits = [0.37 * rank for rank in order]  # distinct, so no set depends on how ties fall
    assert kept(logits, top_k=top_k, top_p=top_p, min_p=min_p) == expected(logits, top_k, top_p, min_p)


def test_draws_follow_the_softmax():
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]]))
    params = SamplingParams.of([SamplingConfig(temperature=1.0, seed=3)], 1)
    draws = jax.vmap(lambda position: sample(logits, params, position[None]))(jnp.arange(4000))
    shares = np.bincount(np.asarray(draws).ravel(), minlength=4) / 4000
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.15, 0.05], atol=0.03)


def test_temperature_sharpens():
    logits = jnp.asarray([[1.0, 0.0]])
    cold = SamplingParams.of([SamplingConfig(temperature=0.05)], 1)
    assert int(sample(logits, cold, jnp.zeros(1, jnp.int32))[0]) == 0


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-45, 1e-300, 5e-324])
def test_a_temperature_near_nothing_is_greedy(temperature):
    logits = jnp.asarray([[500.0, -3.0, 501.0, -jnp.inf], [-1e9, 2.0, 1.999, 0.0]])
    for more in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}):
        params = SamplingParams.of([SamplingConfig(temperature=temperature, **more)] * 2, 2)
        assert sample(logits, params, jnp.asarray([4, 5])).tolist() == [2, 1]


@pytest.mark.parametrize("temperature", [1e30, 1e38, 1e300])
def test_a_temperature_beyond_all_makes_all_alike(temperature):
    params = SamplingParams.of([SamplingConfig(temperature=temperature)], 1)
    assert np.isfinite(np.asarray(filter_logits(jnp.asarray([[5.0, -3.0, 1.0]]), params))).all()


def test_a_draw_depends_on_seed_and_position_not_on_the_batch():
    logits = jnp.tile(jnp.linspace(0, 1, VOCAB)[None], (3, 1))
    params = SamplingParams.of(SamplingConfig(temperature=2.0, seed=7).spread(3), 3)
    together = sample(logits, params, jnp.asarray([4, 5, 6]))
    last = jax.tree.map(lambda leaf: leaf[2:], params)
    assert int(sample(logits[2:], last, jnp.asarray([6]))[0]) == int(together[2])


def test_rows_of_the_head_without_a_token_are_never_drawn():
    logits = mask_padding(jnp.asarray([[1.0, 2.0, 50.0, 60.0]]), 2)
    assert int(greedy(logits)[0]) == 1
    params = SamplingParams.of([SamplingConfig(temperature=3.0)], 1)
    draws = jax.vmap(lambda position: sample(logits, params, position[None]))(jnp.arange(500))
    assert set(np.asarray(draws).ravel().tolist()) == {0, 1}


def test_each_sequence_of_a_batch_has_its_own_options():
    logits = jnp.tile(jnp.asarray([[0.0, 1.0, 1.1]]), (2, 1))
    params = SamplingParams.of([SamplingConfig(temperature=1.0, top_k=1), SamplingConfig(temperature=1.0, top_k=2)], 2)
    assert np.isfinite(np.asarray(filter_logits(logits, params))).sum(axis=1).tolist() == [1, 2]


def test_greedy_and_drawn_sequences_share_a_batch():
    logits = jnp.tile(jnp.asarray([[0.0, 1.0, 1.1]]), (2, 1))
    params = SamplingParams.of([SamplingConfig(), SamplingConfig(temperature=1.0, seed=3)], 2)
    draws = jax.vmap(lambda position: sample(logits, params, jnp.full(2, position)))(jnp.arange(200))
    assert set(np.asarray(draws[:, 0]).tolist()) == {2}
    assert set(np.asarray(draws[:, 1]).tolist()) == {0, 1, 2}


def test_only_options_that_are_given_override():
    base = SamplingConfig(temperature=0.7, top_k=40)
    assert base.override(temperature=None, top_k=0, seed=3) == SamplingConfig(temperature=0.7, top_k=0, seed=3)


def test_greedy_takes_the_lowest_of_equals():
    assert int(greedy(jnp.asarray([[1.0, 3.0, 3.0]]))[0]) == 1


@pytest.mark.parametrize(
    "options", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": 1.0}, {"top_k": -1}, {"seed": -1}]
)
def test_impossible_options_are_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        SamplingConfig(**options)
