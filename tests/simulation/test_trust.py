"""A predictor is followed as far as it proves right: one that knows loses nothing, one that does not costs nothing."""

from dataclasses import replace

import numpy as np
import pytest

from seqmoe_jax.simulation.settings import Simulation, like_engine
from seqmoe_jax.simulation.simulator import simulate
from tests.simulation.oracle import noisy_oracle

LINKS = (0.72, 6.25)


@pytest.fixture(scope="module")
def untrained(short):
    """What a predictor says that was never trained: nothing that has to do with the routing, and sure of it."""
    other = noisy_oracle(short, flip=0.3, rollout=0, trigger=12)
    order = np.random.default_rng(0).permutation(short.steps)
    experts = np.random.default_rng(1).permutation(short.num_experts)
    return replace(
        other,
        next=other.next[order][..., experts],
        refined=other.refined[order][..., experts],
        early=None,
        retention=other.retention[order][..., experts],
    )


def engine(cost, **changes):
    config = Simulation(residency=0.45, policy="seqmoe", prefetcher="seqmoe", transfer_cost=cost, skip=256)
    return replace(like_engine(config), **changes)


@pytest.mark.parametrize("cost", LINKS)
def test_an_untrained_predictor_costs_nothing(short, untrained, cost):
    plain = simulate(short, Simulation(residency=0.45, policy="history", transfer_cost=cost, skip=256))
    blind = simulate(short, engine(cost), untrained)
    guarded = simulate(short, engine(cost, guard=True), untrained)
    assert blind.share_of_full_load < 0.9 * plain.share_of_full_load
    assert guarded.share_of_full_load >= 0.98 * plain.share_of_full_load
    assert guarded.predicted < 0.5, "it rests"
    assert blind.predicted == 1


@pytest.mark.parametrize("cost", LINKS)
def test_a_trained_one_loses_nothing(short, noisy, cost):
    free, guarded = (simulate(short, engine(cost, guard=guard), noisy) for guard in (False, True))
    assert guarded.share_of_full_load >= 0.99 * free.share_of_full_load
    assert guarded.predicted == 1


def test_transfers_that_nothing_uses_turn_prefetching_down(short, noisy, untrained):
    """Eviction knows, so that the predictor stays; what is prefetched is wrong."""
    mixed = replace(noisy, next=untrained.next, refined=untrained.refined)
    free, guarded = (simulate(short, engine(3.0, guard=guard), mixed) for guard in (False, True))
    assert guarded.predicted == 1
    assert guarded.unused_transfers_per_step < 0.8 * free.unused_transfers_per_step
    assert guarded.share_of_full_load >= 0.98 * free.share_of_full_load
