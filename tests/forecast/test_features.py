"""Features, echoes, distances to the next use, losses: against definitions written out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmoe_jax.errors import PredictorError
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.data import divide, prepare, sample, window
from seqmoe_jax.forecast.features import (
    FIRST_ROW,
    NEVER,
    activate,
    activation_features,
    echo_steps,
    steps_until_use,
    token_table,
)
from seqmoe_jax.forecast.training import losses
from tests.forecast.traces import random_trace


def test_features_are_a_softmax_over_the_routed_experts_and_zero_elsewhere():
    ids = np.array([[[2, 0], [1, 3]]], np.uint8)
    probs = np.array([[[204, 51], [255, 0]]], np.uint8)
    got = activation_features(ids, probs, 4).reshape(2, 4)
    np.testing.assert_allclose(got[0], [0.2, 0, 0.8, 0], atol=1e-6)
    assert got[1, 3] > 0, "an expert routed with a weight rounded to zero still shows"
    np.testing.assert_allclose(got.sum(1), 1, rtol=1e-6)


def test_activate_keeps_the_likeliest_experts_and_normalises():
    got = activate(jnp.array([[[0.1, 0.4, 0.2, 0.3]]]), 2)
    np.testing.assert_allclose(got[0, 0], [0, 4 / 7, 0, 3 / 7], rtol=1e-6)


def test_echo_prefers_the_longest_context_then_the_latest():
    #                 0  1  2  3  4  5  6  7
    tokens = np.array([5, 1, 2, 1, 9, 5, 1, 2], np.int32)
    got = echo_steps(tokens, np.array([0, 8]), window=100)
    assert got.tolist() == [-1, -1, -1, 1, -1, 0, 1, 2]
    # Step 6: token 1 after 5 was at step 1, though token 1 alone was at step 3 as well.
    assert echo_steps(tokens, np.array([0, 5, 8]), window=100).tolist() == [-1, -1, -1, 1, -1, -1, -1, -1]


def test_echo_looks_back_no_further_than_its_window():
    tokens = np.array([7, 1, 2, 7], np.int32)
    assert echo_steps(tokens, np.array([0, 4]), window=2)[3] == -1
    assert echo_steps(tokens, np.array([0, 4]), window=3)[3] == 0


def test_unseen_tokens_share_rows():
    table = token_table(np.array([3, 3, 7]), 200)
    assert table[3] == FIRST_ROW
    assert table[7] == FIRST_ROW + 1
    assert set(np.delete(table, [3, 7])) <= set(range(1, FIRST_ROW))


def test_steps_until_the_next_use_count_from_the_step_after():
    active = np.array([[1, 0], [0, 0], [1, 0], [0, 1]], bool)
    got = steps_until_use(active, [0, 3, 4])
    assert got[:, 0].tolist() == [2, 1, NEVER, NEVER]
    assert got[:, 1].tolist() == [NEVER, NEVER, NEVER, NEVER], "the next sequence does not count"


def test_retention_targets():
    until = steps_until_use(np.array([[0], [1], [0], [1]], bool), [0, 4])
    got = losses.retention_target(jnp.asarray(until, jnp.float32), 0.5)
    np.testing.assert_allclose(got[:, 0], [1, 0.5, 1, 0])


def test_ranking_counts_only_hard_negatives():
    target = jnp.array([[0.5, 0.5, 0, 0]])
    assert losses.ranking(jnp.array([[5.0, 5, 1, 3]]), target, 2, 1.0) == pytest.approx(0)
    assert losses.ranking(jnp.array([[5.0, 5, 1, 4.5]]), target, 2, 1.0) == pytest.approx(0.5)


def test_divergence_is_least_at_the_target():
    target = jnp.array([[0.7, 0.3, 0, 0]])
    logits = jnp.log(jnp.array([[0.7, 0.3, 1e-9, 1e-9]]))
    gradient = jax.grad(lambda logits: losses.divergence(logits, target).sum())(logits)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)


CONFIG = PredictorConfig(model="m", layers=2, experts=5, active=2, vocabulary=9, token_rows=FIRST_ROW + 9, echo=50)
TRACE = random_trace(lengths=(12, 7, 20), layers=2, experts=5, active=2, vocabulary=9)


def test_windows_hide_what_came_before_them():
    steps = prepare(TRACE, CONFIG, token_table(TRACE.tok, 9))
    batch = window(steps, jnp.array([14]), jnp.array([19]), 8, CONFIG)
    assert batch.valid[0].tolist() == [True] * 5 + [False] * 3
    np.testing.assert_array_equal(batch.inputs.features[0, 0], 0)
    np.testing.assert_array_equal(batch.inputs.features[0, 1], batch.target[0, 0])
    np.testing.assert_array_equal(batch.target[0, 0], steps.features[14])
    sources = np.asarray(steps.echo[14:19])
    found = np.asarray(batch.inputs.echo[0, :5].max(-1) > 0)
    assert found.tolist() == (sources >= 14).tolist()


def test_recall_is_taken_over_decoded_steps_that_follow_one():
    trace = dataclasses.replace(TRACE, prefill_lens=np.array([0, 4, 20]))
    steps = prepare(trace, CONFIG, token_table(TRACE.tok, 9))
    batch = window(steps, steps.starts, steps.ends, 20, CONFIG)
    assert [np.flatnonzero(row).tolist() for row in batch.scored] == [[*range(1, 12)], [4, 5, 6], []]


def test_sampled_windows_begin_inside_a_sequence_and_with_nothing_known():
    steps = prepare(TRACE, CONFIG, token_table(TRACE.tok, 9))
    batch = sample(steps, jax.random.key(0), 16, 8, 0.5, CONFIG)
    assert bool(batch.valid[:, 0].all())
    assert not batch.inputs.features[:, 0].any()


def test_division_is_of_whole_sequences_and_complete():
    part, held = divide(TRACE)
    assert part.sequences + held.sequences == TRACE.sequences
    assert part.steps + held.steps == TRACE.steps
    with pytest.raises(PredictorError, match="at least 2 sequences"):
        divide(TRACE.take(np.array([0])))


def test_a_trace_of_another_shape_and_a_token_beyond_the_vocabulary_are_refused():
    other = random_trace(lengths=(4,), layers=3, experts=5, active=2, vocabulary=9)
    with pytest.raises(PredictorError, match="is for L=2, E=5, K=2, got L=3, E=5, K=2"):
        prepare(other, CONFIG, token_table(TRACE.tok, 9))
    with pytest.raises(PredictorError, match="beyond the predictor's vocabulary of 3"):
        prepare(TRACE, CONFIG, token_table(np.array([1]), 3))
