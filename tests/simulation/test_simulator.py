"""The simulator against plain Python caches, its time model, and what every feature promises."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

import numpy as np
import pytest

from seqmoe_jax.errors import ConfigError, TraceError
from seqmoe_jax.simulation.settings import Simulation
from seqmoe_jax.simulation.simulator import simulate
from seqmoe_jax.traces.first_order import FirstOrder
from seqmoe_jax.traces.format import Trace

PREFETCHERS = ["seqmoe", "moe-infinity", "promoe"]


def keys_of(trace: Trace) -> list[list[list[int]]]:
    return [
        [[layer * trace.num_experts + int(e) for e in trace.ids[t, layer]] for layer in range(trace.layers)]
        for t in range(trace.steps)
    ]


def lru_hits(trace: Trace, slots: int, skip: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for step, layers in enumerate(keys_of(trace)):
        for routed in layers:
            found = [k for k in routed if k in cache]
            hits += len(found) * (step >= skip)
            for k in found:
                cache.move_to_end(k)
            for k in routed:
                if k not in cache and len(cache) == slots:
                    cache.popitem(last=False)
                cache[k] = None
            for k in routed:
                cache.move_to_end(k)
    return hits


def belady_hits(trace: Trace, slots: int, skip: int) -> int:
    layers = [routed for step in keys_of(trace) for routed in step]
    uses: dict[int, list[int]] = {}
    for position in range(len(layers) - 1, -1, -1):
        for k in layers[position]:
            uses.setdefault(k, []).append(position)
    cache: set[int] = set()
    hits = 0
    for position, routed in enumerate(layers):
        for k in routed:
            uses[k].pop()
        hits += sum(k in cache for k in routed) * (position >= skip * trace.layers)
        for k in routed:
            if k not in cache and len(cache) == slots:
                cache.remove(max(cache - set(routed), key=lambda c: uses[c][-1] if uses[c] else 1 << 40))
            cache.add(k)
    return hits


def test_prompts_are_known_but_not_simulated(short, oracle):
    """A trace with prompts gives what its decoded steps alone would; prefill-hot alone looks at the prompts."""
    prompted = dataclasses.replace(short, prefill_lens=np.array([40, 0, int(short.lens[2])]))
    alone = prompted.without_prompts()
    assert (alone.sequences, alone.steps) == (2, short.steps - 40 - int(short.lens[2]))
    config = Simulation(residency=0.45, policy="seqmoe", prefetcher="seqmoe", skip=50)
    forecasts = oracle.take(prompted.decoded())
    assert simulate(prompted, config, oracle) == simulate(alone, config, forecasts)
    config = Simulation(residency=0.45, policy="prefill-hot", skip=50)
    assert simulate(prompted, config) != simulate(alone, config)


@pytest.mark.parametrize("residency", [0.1, 0.45])
@pytest.mark.parametrize(("policy", "hits"), [("lru", lru_hits), ("belady", belady_hits)])
def test_hits_are_those_of_a_plain_cache(short, policy, hits, residency):
    result = simulate(short, Simulation(residency=residency, policy=policy, skip=20))
    routed = (short.steps - 20) * short.layers * short.active
    assert result.slots == int(residency * 768)
    assert round(result.hit_rate * routed) == hits(short, result.slots, 20)


def test_time_without_prefetch_is_compute_plus_misses(short):
    result = simulate(short, Simulation(residency=0.3, policy="lru", transfer_cost=3.0, skip=50))
    misses = (1 - result.hit_rate) * short.layers * short.active
    assert result.transfers_per_step == pytest.approx(misses)
    assert result.share_of_full_load == pytest.approx(short.layers / (short.layers + 3 * misses))
    assert result.unused_transfers_per_step == 0


def test_everything_resident_is_full_load(short, oracle):
    # Long enough for every expert to have been loaded once.
    last = simulate(short, Simulation(residency=1.0, policy="lru", skip=short.steps - 20))
    assert last.hit_rate > 0.99
    assert last.share_of_full_load == pytest.approx(1.0, abs=0.05)


def test_order_of_the_policies(short, oracle):
    def rate(policy):
        return simulate(short, Simulation(residency=0.3, policy=policy, skip=100), oracle).hit_rate

    assert rate("belady") >= rate("belady-8") > rate("lru")
    assert rate("belady") > rate("seqmoe") > rate("lru")
    assert rate("seqmoe-rollout") > rate("lru")
    assert rate("lfu") < rate("belady")
    assert rate("prefill-hot") < rate("belady")


@pytest.mark.parametrize("prefetcher", PREFETCHERS)
@pytest.mark.parametrize("policy", ["lru", "lfu", "prefill-hot", "belady", "belady-8", "seqmoe-rollout", "seqmoe"])
def test_prefetch_helps_every_policy(short, oracle, policy, prefetcher):
    without = simulate(short, Simulation(residency=0.35, policy=policy, transfer_cost=0.5, skip=100), oracle)
    config = Simulation(residency=0.35, policy=policy, prefetcher=prefetcher, transfer_cost=0.5, skip=100)
    result = simulate(short, config, oracle)
    assert result.hit_rate > without.hit_rate
    assert result.share_of_full_load > without.share_of_full_load
    assert result.share_of_full_load <= result.link_bound + 1e-9


def test_known_future_on_a_fast_link_is_nearly_full_load(short, oracle):
    config = Simulation(residency=0.45, policy="seqmoe", prefetcher="seqmoe", transfer_cost=0.05, skip=100, refine=True)
    result = simulate(short, config, oracle)
    assert result.share_of_full_load > 0.97
    assert result.hit_rate > 0.97


BASE = {"residency": 0.35, "policy": "seqmoe", "prefetcher": "seqmoe", "transfer_cost": 3.0, "skip": 100}


def test_chunks_shorten_the_wait_of_a_miss(short, noisy):
    whole = simulate(short, Simulation(**BASE), noisy)
    parts = simulate(short, Simulation(**BASE, chunks=16), noisy)
    assert parts.share_of_full_load > whole.share_of_full_load + 0.02


@pytest.mark.parametrize(("name", "layers"), [("refine", slice(13, None)), ("early", slice(0, 12))])
def test_forecasts_in_mid_step_find_more_in_their_layers(short, noisy, name, layers):
    base = BASE | {"transfer_cost": 1.0}
    plain = simulate(short, Simulation(**base), noisy)
    more = simulate(short, Simulation(**base | {name: True}), noisy)
    assert np.mean(more.hit_rate_per_layer[layers]) > np.mean(plain.hit_rate_per_layer[layers]) + 0.005


def test_comparison_saves_transfers(short, noisy):
    base = BASE | {"transfer_cost": 1.0}
    free = simulate(short, Simulation(**base), noisy)
    strict = simulate(short, Simulation(**base, compare=True), noisy)
    assert strict.unused_transfers_per_step < free.unused_transfers_per_step
    assert strict.transfers_per_step < free.transfers_per_step


def test_tasks_beyond_the_step_reach_its_first_layers(short, oracle):
    near = simulate(short, Simulation(**BASE | {"transfer_cost": 1.0}), oracle)
    far = simulate(short, Simulation(**BASE | {"transfer_cost": 1.0}, horizon=1), oracle)
    assert np.mean(far.hit_rate_per_layer[:2]) > np.mean(near.hit_rate_per_layer[:2])


def test_runs_in_blocks_are_one_run(short, noisy, monkeypatch):
    config = Simulation(**BASE, chunks=4, refine=True, early=True, compare=True, late=True, horizon=2)
    whole = simulate(short, config, noisy)
    monkeypatch.setattr("seqmoe_jax.simulation.simulator.BLOCK", 97)
    assert simulate(short, config, noisy) == whole


def test_smallest_pool_runs(short, noisy):
    least = Simulation(**BASE | {"residency": 5 / 768, "transfer_cost": 0.1, "skip": 0})
    assert 0 <= simulate(short, least, noisy).hit_rate < 0.5
    with pytest.raises(ConfigError, match="4 slots, too few"):
        simulate(short, dataclasses.replace(least, residency=4 / 768), noisy)


def test_forecasts_know_nothing_of_other_sequences(excerpt):
    """A sequence's rows are the same whatever stands before it."""
    first_order = FirstOrder.fit(excerpt.select("train"))
    test = excerpt.select("test")
    together = first_order.forecasts(test, rollout=2)
    start = int(test.seq_offsets[2])
    alone = first_order.forecasts(test.take(np.arange(2, test.sequences)), rollout=2)
    for name in ("next", "retention", "rollout"):
        assert np.array_equal(getattr(together, name)[start:], getattr(alone, name))
    assert together.next.astype(np.float32).sum(axis=2).mean() == pytest.approx(excerpt.active, abs=0.1)


def test_faults(short, excerpt, noisy):
    with pytest.raises(TraceError, match="forecasts are for another trace"):
        simulate(excerpt, Simulation(**BASE), noisy)
    with pytest.raises(TraceError, match="outside \\[0, 1\\]"):
        simulate(short, Simulation(**BASE), dataclasses.replace(noisy, next=noisy.next * 4))
    with pytest.raises(TraceError, match="trigger layer from 1 to 23, got None"):
        simulate(short, Simulation(**BASE), dataclasses.replace(noisy, trigger=None))
    with pytest.raises(ConfigError, match="needs forecasts"):
        simulate(short, Simulation(**BASE))
    with pytest.raises(ConfigError, match="no rollout"):
        simulate(short, Simulation(**BASE, horizon=1), dataclasses.replace(noisy, rollout=None))
    with pytest.raises(ConfigError, match="the first 500 are not counted"):
        simulate(short.take(np.arange(1)), Simulation(residency=0.5))
    for change, message in [
        ({"residency": 0.0}, "residency must be in"),
        ({"transfer_cost": 0.0}, "transfer cost must be above 0"),
        ({"chunks": 0}, "chunks must be at least 1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Simulation(**BASE | change)
