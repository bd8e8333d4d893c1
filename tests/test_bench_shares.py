"""Time shares add up, count every launch once, and a profile without a device is refused in words."""

import pytest

from seqmoe_jax.bench.profile import profile_steps, scopes_of
from seqmoe_jax.bench.shares import Launch, describe, shares_of
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.errors import ProfileError
from seqmoe_jax.options import EngineOptions
from seqmoe_jax.testing import tiny_model


def steps_of(*step: tuple[str, str, float], count: int = 2, gap: float = 1.0) -> list[Launch]:
    """`count` steps of launches (name, scope, duration), each a gap after the one before."""
    launches, now = [], 100.0
    for _ in range(count):
        for name, scope, duration in step:
            launches.append(Launch(name=name, scope=scope, start=now, duration=duration))
            now += duration + gap
    return launches


STEP = (
    ("fusion_3", "jit(step)/layer0/mixer/dot_general", 10.0),
    ("matvec__1", "jit(step)/layer0/moe/jit(matvec)/pallas_call", 2.0),
    ("slot_update__2", "jit(step)/layer0/moe/slot_update/pallas_call", 3.0),
    ("miss_load", "jit(step)/layer0/moe/miss_load/pallas_call", 20.0),
    ("fused_moe_up", "", 5.0),
    ("sort_7", "jit(step)/refine/plan/sort", 4.0),
    ("fusion.12", "jit(step)/refine/rescore/select_n", 1.0),
    ("gemm", "jit(step)/refine/dot_general", 6.0),
    ("gemm", "jit(step)/forecast/dot_general", 7.0),
    ("fusion_4", "jit(step)/head/dot_general", 8.0),
    ("concatenate", "jit(step)/concatenate", 0.5),
)


def test_a_launch_counts_for_its_innermost_scope():
    found = shares_of(steps_of(*STEP), 2)
    assert found["us_per_step"] == {
        "compute": 25.0, "predictor": 13.0, "management": 8.0, "stall": 20.0, "other": 0.5, "idle": 10.5,
    }  # fmt: skip
    assert found["parts_us"]["plan"] == 4.0
    assert sum(found["share"].values()) == pytest.approx(1)
    assert found["launches_per_step"] == len(STEP)


def test_launches_of_one_kernel_in_one_scope_are_a_line():
    found = shares_of(steps_of(*STEP, ("fusion_9", "jit(step)/layer1/mixer/add", 30.0)), 2)
    first = found["kernels"][0]
    assert (first["kernel"], first["scope"], first["launches_per_step"]) == ("fusion", "mixer", 2)
    assert first["us_per_step"] == 40
    said = describe({"step_us": 240.0, "shares": found | {"copies_beside_us": 0.0}})
    assert "a step as timed: 240 us" in said
    assert len(said.splitlines()) == 2 + len(found["kernels"])


def test_what_slot_update_takes_longer_than_usual_is_a_wait_where_an_engine_runs():
    launches = [
        Launch(name="slot_update", scope="slot_update", start=20.0 * index, duration=duration)
        for index, duration in enumerate([3.0, 3.0, 15.0, 3.0, 2.0])
    ]
    assert shares_of(launches, 1)["us_per_step"]["stall"] == 0
    found = shares_of(launches, 1, engine=True)
    assert (found["parts_us"]["wait"], found["us_per_step"]["management"]) == (12, 14)


def test_what_the_up_projection_takes_longer_where_it_loads_is_a_stall():
    launches = [
        Launch(name="fused_moe_load_and_up__3", scope="layer0/moe", start=500.0 * index, duration=duration)
        for index, duration in enumerate([16.0, 380.0, 15.0, 760.0, 380.0, 17.0])
    ]
    found = shares_of(launches, 1)
    assert found["us_per_step"]["stall"] == 364 + 744 + 364 + 1  # of launches of 16
    assert found["parts_us"]["moe"] + found["parts_us"]["miss_load"] == sum(launch.duration for launch in launches)


def test_overlapping_launches_leave_no_negative_gap():
    launches = [Launch(name=name, scope="head", start=start, duration=5.0) for name, start in (("b", 3.0), ("a", 0.0))]
    assert shares_of(launches, 1)["us_per_step"]["idle"] == 0


def test_no_launches_is_an_error():
    with pytest.raises(ProfileError, match="expected launches"):
        shares_of([], 3)


@pytest.fixture(scope="module")
def engine():
    engine = TokenEngine(tiny_model(), EngineOptions(policy="seqmoe", residency=0.7))
    list(engine.run([[1, 2, 3]], max_new_tokens=9))
    return engine


def test_the_program_says_the_scope_of_its_instructions(engine):
    scopes = scopes_of(engine.step_program().as_text() or "")
    parts = {Launch(name=name, scope=scope, start=0.0, duration=0.0).part for name, scope in scopes.items()}
    assert {"mixer", "moe", "slot_update", "miss_load", "rescore", "head", "forecast"} <= parts


def test_a_backend_without_a_device_profile_says_so_and_the_engine_goes_on(engine):
    with pytest.raises(ProfileError, match="no launches of jit_step on a device"):
        profile_steps(engine, [[1, 2, 3]], new=9, steps=4)
    assert len(list(engine.run([[1, 2, 3]], max_new_tokens=9))) == 9
