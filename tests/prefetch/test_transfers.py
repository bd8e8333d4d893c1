"""Prefetching changes when an expert arrives, never a token: every engine, with and without faults."""

import numpy as np
import pytest

from pallas_kernels.plan_tasks import DEADLINE, KEY
from scripts.checks.faults import Faults, injected
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.experts.slots import SlotState, check_invariants
from seqmoe_jax.options import EngineOptions
from seqmoe_jax.prefetch.device_put import DevicePut
from seqmoe_jax.testing import tiny_model, untrained_predictor

pytest.importorskip("flax.nnx")

NEW = 60
RUNS = 20  # at most, until something happens to a transfer: how many there are is a matter of time
PROMPTS = [[1, 2, 3], list(range(40, 54))]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def predictor(model):
    return untrained_predictor(model)


def generate(engine, prompts):
    tokens = [[] for _ in prompts]
    for event in engine.run(prompts, max_new_tokens=NEW):
        tokens[event.sequence].append(event.token)
    return tokens


@pytest.fixture(scope="module")
def full_load(model):
    engine = TokenEngine(model, EngineOptions(policy="full", max_batch=2))
    return {"single": generate(engine, PROMPTS[:1]), "batch": generate(engine, PROMPTS)}


@pytest.fixture(scope="module", params=["none", "device_put", "callback", "in mid-step"])
def engine(request, model, predictor):
    options, patch = dict(transfers=request.param, threshold=0.01), pytest.MonkeyPatch()
    if request.param == "in mid-step":
        options["transfers"] = "device_put"
        patch.setattr(DevicePut, "ahead", 1)  # as `dma` plans, which needs a GPU
    engine = TokenEngine(model, EngineOptions(residency=0.7, max_batch=2, tasks=3, **options), predictor=predictor)
    yield engine
    engine.close()
    patch.undo()


def test_tokens_are_those_of_full_load(engine, full_load):
    for _ in range(2):
        assert generate(engine, PROMPTS[:1]) == full_load["single"]
        stats = engine.last_stats
        assert stats.hit_rate < 1
        assert stats.forecast == "untrained"
    assert generate(engine, PROMPTS) == full_load["batch"]
    if engine.transfers_name != "none":
        counts = engine.transfers.counts()
        assert counts.landed >= engine.last_stats.experts_prefetched > 0
        assert counts.bytes >= counts.landed * engine.config.layout.block_bytes


def test_tasks_have_deadlines_in_the_step_that_is_planned_for(engine, monkeypatch):
    if engine.transfers_name != "device_put":
        pytest.skip("its plans are not to be seen here")
    seen = set()

    def listen(tasks, clock):
        for key, deadline in np.asarray(tasks)[[KEY, DEADLINE]].T[np.asarray(tasks)[KEY] >= 0]:
            step, layer = divmod(int(deadline) - int(clock), 2)
            assert layer == key // 8
            seen.add(step)

    monkeypatch.setattr(engine.transfers, "enqueue", listen)
    generate(engine, PROMPTS[:1])
    assert seen == {engine.transfers.ahead - 1}


def test_nothing_is_left_under_way_after_a_request(engine):
    generate(engine, PROMPTS[:1])
    engine.offloading.begin_prompts()
    tables = engine.offloading.state.cache.tables
    check_invariants(tables)
    assert not np.isin(np.asarray(tables.state), [SlotState.FETCH, SlotState.COMPUTE]).any()


def test_routing_may_be_read_after_a_request(engine, model):
    generate(engine, PROMPTS[:1])
    full = TokenEngine(model, EngineOptions(policy="full"))
    for ours, expected in zip(engine.routing(PROMPTS[1:]), full.routing(PROMPTS[1:]), strict=True):
        np.testing.assert_array_equal(ours[0], expected[0])
    states = np.asarray(engine.offloading.state.cache.tables.state)
    assert not np.isin(states, [SlotState.FETCH, SlotState.COMPUTE]).any()


def test_faults_of_the_link_cost_no_token(engine, full_load):
    if engine.transfers is None:
        pytest.skip("moves nothing")
    with injected(engine.transfers, Faults(drop_every=2, delay_s=0.001, throttle_s=0.001)) as faults:
        for _ in range(RUNS):
            assert generate(engine, PROMPTS) == full_load["batch"]
            if faults.dropped > 0:
                break
    assert faults.dropped > 0


def test_a_worker_that_dies_costs_no_token_and_is_reported(model, predictor, full_load):
    engine = TokenEngine(
        model,
        EngineOptions(residency=0.7, transfers="device_put", max_batch=2, tasks=3, threshold=0.01),
        predictor=predictor,
    )
    assert generate(engine, PROMPTS[:1]) == full_load["single"]
    with injected(engine.transfers, Faults(broken=True)):
        for _ in range(RUNS):
            assert generate(engine, PROMPTS) == full_load["batch"]
            if fault := engine.transfers.fault():
                break
    assert fault is not None
    assert "stopped" in fault
    assert generate(engine, PROMPTS[:1]) == full_load["single"]
    engine.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(transfers="warp"), "expected one of auto, none, device_put, callback, dma"),
        (dict(transfers="device_put"), "need policy seqmoe and a predictor"),
        (dict(transfers="device_put", policy="lru"), "need policy seqmoe and a predictor"),
    ],
)
def test_an_engine_that_cannot_work_is_refused(model, options, message):
    with pytest.raises(ConfigError, match=message):
        TokenEngine(model, EngineOptions(residency=0.5, **options))


def test_dma_is_refused_without_a_gpu(model, predictor):
    with pytest.raises(ConfigError, match="needs the kernels for CUDA GPUs"):
        TokenEngine(model, EngineOptions(residency=0.5, transfers="dma"), predictor=predictor)


def test_a_predictor_of_another_shape_is_refused(model, predictor):
    other = tiny_model(num_experts=4)
    with pytest.raises(Exception, match="L=2, E=8, K=2"):
        TokenEngine(other, EngineOptions(residency=0.5), predictor=predictor)
