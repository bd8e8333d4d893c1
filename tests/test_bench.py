"""Benchmarks run on a CPU too: what they force is what runs, and every row adds up."""

import json

import numpy as np
import pytest

from seqmoe_jax.bench.replayed import replay_of
from seqmoe_jax.cli.main import main
from seqmoe_jax.errors import TraceError
from seqmoe_jax.models.families import spec_from_config
from seqmoe_jax.testing import tiny_config
from seqmoe_jax.traces.format import read_trace, write_trace
from seqmoe_jax.traces.stretch import stretch

TRACE = "tests/data/gptoss20b_excerpt.npz"


@pytest.fixture(scope="module")
def trace():
    return read_trace(TRACE)


def spec(**changes):
    return spec_from_config(tiny_config(mlp_only_layers=[], **changes))


def test_a_model_of_the_traces_shape_gets_the_trace_itself(trace):
    same = spec(num_hidden_layers=trace.layers, num_experts=trace.num_experts, num_experts_per_tok=trace.active)
    replay = replay_of(trace, same, 20, least=1)
    np.testing.assert_array_equal(replay.ids, trace.ids[:20])
    np.testing.assert_array_equal(replay.tokens, trace.tok[:20])
    np.testing.assert_allclose(replay.weights.sum(-1), 1, atol=1e-6)


def test_routing_is_stretched_to_more_layers_and_experts(trace):
    larger = spec(num_hidden_layers=2 * trace.layers, num_experts=128, num_experts_per_tok=8)
    replay = replay_of(trace, larger, 30, least=1)
    assert replay.ids.shape == (30, 2 * trace.layers, 8)
    assert 0 <= int(replay.ids.min()) <= int(replay.ids.max()) < 128
    assert all(len(set(row)) == 8 for row in np.asarray(replay.ids).reshape(-1, 8).tolist())
    np.testing.assert_allclose(replay.weights.sum(-1), 1, atol=1e-6)


def test_a_stretched_trace_replays_as_the_trace_it_was_made_of(trace, tmp_path):
    larger = spec(num_hidden_layers=40, num_experts=128, num_experts_per_tok=8)
    write_trace(tmp_path / "s.npz", stretch(trace, layers=40, experts=128, active=8))
    written = read_trace(tmp_path / "s.npz").select("test")
    for ours, theirs in zip(replay_of(trace.select("test"), larger, 500), replay_of(written, larger, 500), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_what_cannot_be_stretched_is_refused(trace):
    with pytest.raises(TraceError, match="4 active or more, and at least 64 experts"):
        replay_of(trace, spec(num_experts=48, num_experts_per_tok=8), 10, least=1)
    same = spec(num_hidden_layers=trace.layers, num_experts=trace.num_experts, num_experts_per_tok=trace.active)
    with pytest.raises(TraceError, match="no sequence of the trace has"):
        replay_of(trace, same, 10, least=10**6)


def test_the_command_reports_every_setting(capsys, tmp_path):
    arguments = ["bench", "demo", "--residency", "0.3", "1", "--policies", "lru", "--predictor", "none"]
    more = ["--steps", "6", "--repeats", "1", "--json", "--out", str(tmp_path / "b.json")]
    assert main([*arguments, *more]) == 0
    result = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "b.json").read_text()) == result
    assert main([*arguments, *more, "--temperature", "1"]) == 2
    assert "has a benchmark of another run (temperature 0.0 there, 1.0 here)" in capsys.readouterr().err
    (tmp_path / "b.json").write_text("notes")
    assert main([*arguments, *more]) == 2
    assert "b.json is there already and is no benchmark" in capsys.readouterr().err
    lru, full = result["rows"]
    assert (full["name"], lru["name"]) == ("full", "lru")
    assert full["hit_rate"] == 1
    assert lru["hit_rate"] < 1
    assert lru["tokens_of_full_load"]
    assert len(lru["first_tokens"]) == 7
    assert lru["bytes_per_step"] == pytest.approx(lru["loaded_per_step"] * result["expert_bytes"])
    assert lru["share_of_full_load"] == pytest.approx(lru["tokens_per_second"] / full["tokens_per_second"])


def test_a_setting_that_fails_is_reported_and_is_no_success(capsys):
    # One slot is too few for the demo's K; the other row is still measured.
    arguments = ["bench", "demo", "--residency", "0.001", "1", "--policies", "lru", "--predictor", "none"]
    assert main([*arguments, "--steps", "2", "--repeats", "0", "--json"]) == 1
    failed, full = json.loads(capsys.readouterr().out)["rows"]
    assert "the least is 4 slots" in failed["error"]
    assert full["hit_rate"] == 1


def test_a_setting_that_needs_a_predictor_says_so(capsys):
    assert main(["bench", "demo", "--predictor", "none", "--policies", "evict", "--residency", "0.5"]) == 2
    assert "evict need a predictor" in capsys.readouterr().err
