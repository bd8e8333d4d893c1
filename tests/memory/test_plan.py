"""Slots and memory follow from what was asked for, or it is refused in plain words."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from seqmoe_jax.errors import ConfigError, ResidencyError
from seqmoe_jax.memory.plan import dense_bytes, least_slots, plan_memory
from seqmoe_jax.models.families import spec_from_config
from seqmoe_jax.options import parse_bytes
from seqmoe_jax.prefill.lengths import kv_capacity
from seqmoe_jax.presets import preset_names, preset_path
from seqmoe_jax.testing import tiny_config, tiny_model

TINY = spec_from_config(tiny_config())
QWEN = spec_from_config(json.loads(preset_path("qwen3-30b-a3b-fp8").read_text()))


def test_sizes_are_read_with_their_units():
    assert parse_bytes("12GiB") == 12 * 2**30
    assert parse_bytes("1.5 GB") == 1_500_000_000
    assert parse_bytes("800m") == 800_000_000
    assert parse_bytes(7_000_000) == 7_000_000
    for text in ("", "lots", "12 parsecs", "-3GB"):
        with pytest.raises(ConfigError, match="memory size"):
            parse_bytes(text)


def test_qwen3_30b_has_the_published_sizes():
    assert QWEN.num_keys == 6144
    # 4,719,168 bytes with 16-bit scales; ours are float32 (288 more 2-byte halves) in a block of whole rows.
    fields = sum(field.nbytes for field in QWEN.expert_layout.fields)
    assert fields == 3 * 768 * 2048 + 288 * 4
    assert 0 <= QWEN.expert_layout.block_bytes - fields < 3 * 2048
    assert abs(dense_bytes(QWEN, ml_dtypes.bfloat16) / 2 - 1.543e9) < 0.01e9


def test_dense_bytes_are_those_of_the_weights():
    import jax

    model = tiny_model()
    assert dense_bytes(model.spec, np.float32) == sum(leaf.nbytes for leaf in jax.tree.leaves(model.weights))


def test_residency_gives_slots():
    assert plan_memory(TINY, residency=0.5).slots == 8
    assert plan_memory(TINY, residency=1.0).slots == 16
    assert plan_memory(TINY, residency="least", batch=3).slots == 6
    assert least_slots(TINY, 8) == 8  # no more than E


def test_without_a_limit_everything_is_resident():
    assert plan_memory(TINY).slots == TINY.num_keys


def test_a_budget_is_filled_and_never_exceeded():
    whole = plan_memory(QWEN, activation_dtype=ml_dtypes.bfloat16)
    for budget in (7 * 10**9, 10 * 10**9, 20 * 10**9, 60 * 10**9):
        plan = plan_memory(QWEN, device_memory=budget, activation_dtype=ml_dtypes.bfloat16)
        assert plan.total <= budget
        assert plan.slots == whole.slots or plan.total + QWEN.expert_layout.block_bytes > budget


def test_slots_take_what_they_hold_whatever_the_size_of_their_array():
    for residency in (0.05, 0.1, 0.14, 0.2):  # 1.4 to 5.8 GB of bytes
        plan = plan_memory(QWEN, residency=residency, activation_dtype=ml_dtypes.bfloat16)
        assert plan.slot_cache == plan.slots * QWEN.expert_layout.block_bytes


@pytest.mark.parametrize("residency", [-0.1, 0.0, 1.01, 50])
def test_residencies_out_of_range_name_the_range_and_the_least(residency):
    with pytest.raises(ResidencyError, match=r"\(0, 1\].*the least is 2 slots"):
        plan_memory(TINY, residency=residency)


def test_a_residency_too_small_for_k_and_b_says_what_is_least():
    with pytest.raises(ResidencyError, match=r"the least is 6 slots \(residency 0.3750\) for 3 sequence"):
        plan_memory(TINY, residency=0.3, batch=3)


def test_too_little_memory_says_how_much_is_needed():
    with pytest.raises(ResidencyError, match="needs at least"):
        plan_memory(QWEN, device_memory=10**9)
    with pytest.raises(ResidencyError, match="are available"):
        plan_memory(QWEN, residency=1.0, available=10 * 10**9)


def test_contradictions_are_refused():
    with pytest.raises(ConfigError, match="not both"):
        plan_memory(TINY, residency=0.5, device_memory=10**9)
    with pytest.raises(ConfigError, match="1 to 8"):
        plan_memory(TINY, batch=9)


def test_kv_capacity_holds_the_length_in_few_sizes():
    sizes = {kv_capacity(length) for length in range(1, 40961, 7)}
    assert all(kv_capacity(length) >= length for length in range(1, 40961, 7))
    assert len(sizes) < 16


def test_every_preset_is_a_model():
    for name in preset_names():
        spec_from_config(json.loads(preset_path(name).read_text()))
    assert Path(preset_path("qwen3-30b-a3b-fp8")).name == "qwen3-30b-a3b-fp8.json"
    with pytest.raises(ConfigError, match="expected one of"):
        preset_path("no-such-model")
