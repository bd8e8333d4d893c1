"""A peer is measured on the routing that `seqmoe bench` replays, row for row."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.peer.bench_freetoken import replayed_rows
from seqmoe_jax.bench.replayed import replay_of
from seqmoe_jax.models.families import spec_from_config
from seqmoe_jax.testing import tiny_config
from seqmoe_jax.traces.format import read_trace

TRACE = Path("tests/data/gptoss20b_excerpt.npz")


def test_the_rows_are_those_that_our_benchmark_replays():
    trace = read_trace(TRACE)
    sizes = dict(num_hidden_layers=trace.layers, num_experts=trace.num_experts, num_experts_per_tok=trace.active)
    spec = spec_from_config(tiny_config(mlp_only_layers=[], **sizes))
    for split, least in ((None, 1), ("test", 1), ("test", int(np.median(trace.select("test").lens)))):
        ours = replay_of(trace if split is None else trace.select(split), spec, 100, least=least)
        theirs = replayed_rows(TRACE, split, 100, least=least)
        assert theirs.dtype == np.int32
        np.testing.assert_array_equal(theirs, ours.ids)


def test_a_residency_that_fails_is_a_row_and_no_success(tmp_path):
    pytest.importorskip("transformers")
    if not (read_trace(TRACE).lens >= 200).any():
        pytest.skip("the excerpt has no long sequence")
    words = ["scripts/peer/bench_freetoken.py", "--replay", TRACE, "--residency", "0.5", "--out", tmp_path / "p.json"]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    (row,) = json.loads((tmp_path / "p.json").read_text())["rows"]
    assert "freetoken" in row["error"]
