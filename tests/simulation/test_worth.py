"""What a predictor is worth, and the engine's policy without one."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from seqmoe_jax.errors import TraceError
from seqmoe_jax.forecast import history
from seqmoe_jax.simulation.settings import Simulation
from seqmoe_jax.simulation.simulator import simulate
from seqmoe_jax.simulation.values import value_by_history
from seqmoe_jax.simulation.worth import find_worth, gain, pays, table


def test_history_scores_as_the_engine_does(short):
    keys = short.layers * short.num_experts
    value, kept = np.zeros(keys), jnp.zeros(keys)
    for step in short.ids[:30].astype(np.int64):
        value_by_history(value, step, short.layers)
        kept = history.observe(kept, jnp.asarray(step[:, None], jnp.int32), short.num_experts)
    np.testing.assert_allclose(value, kept, atol=1e-6)


def test_history_is_better_than_lru_where_little_fits(short):
    hits = [simulate(short, Simulation(residency=0.25, policy=policy)).hit_rate for policy in ("lru", "history")]
    assert hits[0] < hits[1]


def test_a_predictor_that_knows_pays_and_one_that_does_not_fails_to(short, oracle):
    known = find_worth(short, lambda: oracle, [0.45], [0.72])
    assert gain(known, 0.45, 0.72) > 1
    assert pays(known)
    assert "with it / best without" in table(known)
    blind = type(oracle)(
        next=oracle.next[::-1], retention=oracle.retention[::-1], refined=oracle.refined[::-1], trigger=oracle.trigger
    )
    assert not pays(find_worth(short, lambda: blind, [0.45], [3.0]))


def first_steps(trace, count):
    return replace(
        trace, ids=trace.ids[:count], probs_u8=trace.probs_u8[:count], tok=trace.tok[:count], lens=np.array([count]),
        seq_offsets=np.array([0, count]), prefill_lens=None, split=None, metadata={},
    )  # fmt: skip


def test_a_trace_too_short_to_judge_by_is_refused(short, oracle):
    with pytest.raises(TraceError, match="expected some decoded steps to simulate"):
        find_worth(first_steps(short, 5), lambda: oracle, [0.45], [1.0])
