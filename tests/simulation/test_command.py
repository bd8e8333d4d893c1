"""`seqmoe simulate` as a user calls it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from seqmoe_jax.cli.simulate import add_arguments, run
from seqmoe_jax.errors import ConfigError, PredictorError, TraceError
from seqmoe_jax.traces.first_order import FirstOrder
from seqmoe_jax.traces.forecasts import write_forecasts

EXCERPT = str(Path(__file__).parents[1] / "data" / "gptoss20b_excerpt.npz")


def simulate(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    residency = [] if "--residency" in words else ["--residency", "0.45"]
    return run(parser.parse_args([EXCERPT, *residency, *words]))


@pytest.fixture(scope="session")
def first_order(excerpt, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("forecasts") / "f.npz"
    write_forecasts(path, FirstOrder.fit(excerpt.select("train")).forecasts(excerpt.select("test"), rollout=1))
    return str(path)


def test_json_has_the_promised_names(capsys):
    assert simulate("--policy", "belady", "--transfer-cost", "0.72", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    names = ("hit_rate", "transfers_per_step", "unused_transfers_per_step", "share_of_full_load", "link_bound")
    assert all(said[name] >= 0 for name in names)
    assert said["hit_rate"] > 0.9
    assert (said["policy"], said["transfer_cost"], said["slots"]) == ("belady", 0.72, 345)


def test_one_line_for_people(capsys, first_order):
    words = ["--policy", "seqmoe", "--prefetcher", "seqmoe", "--split", "test", "--forecasts", first_order]
    assert simulate(*words, "--transfer-cost", "3", "--threshold", "auto") == 0
    said = capsys.readouterr()
    assert said.out.startswith("seqmoe, prefetcher seqmoe, 345 slots, RHO 3: hit rate 0.")
    assert said.err == ""


def test_beyond_is_set_for_the_link_and_yields_to_what_is_named(capsys, first_order):
    words = ["--policy", "seqmoe", "--prefetcher", "seqmoe", "--split", "test", "--forecasts", first_order]
    simulate(*words, "--beyond", "--transfer-cost", "0.5", "--threshold", "0.1", "--json")
    said = json.loads(capsys.readouterr().out)
    assert said["threshold"] == 0.1
    assert said["chunks"] == 16
    assert said["late"]
    assert not said["refine"]  # first order has nothing to say in mid-step


def test_first_order_statistics_need_no_file(capsys, first_order):
    words = ["--policy", "seqmoe", "--prefetcher", "seqmoe", "--split", "test", "--json"]
    simulate(*words, "--forecasts", first_order)
    said = capsys.readouterr().out
    simulate(*words, "--predictor", "first-order")
    assert capsys.readouterr().out == said


def test_several_settings_are_a_table_or_a_list(capsys, first_order):
    common = ["--policy", "lru", "seqmoe", "--residency", "0.45", "0.25", "--transfer-cost", "0.72", "3",
              "--split", "test", "--forecasts", first_order]  # fmt: skip
    simulate(*common, "--json")
    said = json.loads(capsys.readouterr().out)
    points = [(one["policy"], one["residency"], one["transfer_cost"]) for one in said]
    assert points == [(p, r, cost) for p in ("lru", "seqmoe") for r in (0.45, 0.25) for cost in (0.72, 3)]
    simulate(*common)
    head, rule, *rows = capsys.readouterr().out.splitlines()
    assert head.endswith("| 45 %, RHO 0.72 | 45 %, RHO 3 | 25 %, RHO 0.72 | 25 %, RHO 3 |")
    assert rule == "| --- | --- | --- | --- | --- |"
    assert [row.split("|")[1].strip() for row in rows] == ["lru, prefetcher none", "seqmoe, prefetcher none"]
    assert rows[1].split("|")[5].startswith(f" {said[7]['share_of_full_load']:.3f} ({said[7]['hit_rate']:.3f}; ")


def test_transfer_cost_from_the_hardware(capsys):
    simulate("--expert-bytes", "13e6", "--bandwidth", "50", "--layer-time", "130", "--json")
    assert json.loads(capsys.readouterr().out)["transfer_cost"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["--split", "dev"], TraceError, "no split 'dev'"),
        (["--forecasts", "none.npz"], TraceError, "expected a file of forecasts, got no such file"),
        (["--predictor", "none-there"], PredictorError, "no predictor here"),
        (["--predictor", "auto"], PredictorError, "needs a model to look up"),
        (["--prefetcher", "seqmoe"], ConfigError, "needs forecasts"),
        (["--bandwidth", "50"], ConfigError, "go together"),
        (["--transfer-cost", "1", "--bandwidth", "50"], ConfigError, "not both"),
        (["--skip", "5000"], ConfigError, "the trace has 2306 steps"),
    ],
)
def test_faults(words, error, message):
    with pytest.raises(error, match=message):
        simulate(*words)


def test_other_commands_do_not_pay_for_the_compiler():
    code = "import sys; from seqmoe_jax.cli import main, plot, simulate, trace; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
