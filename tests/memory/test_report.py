"""`seqmoe plan` answers from a `config.json` alone, with the numbers that loading would use."""

import json

import pytest

from seqmoe_jax.cli.main import main
from seqmoe_jax.testing import tiny_config, tiny_engine


def plan(capsys, *arguments):
    status = main(["plan", *map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.fixture
def tiny(tmp_path):
    """A model directory without weights."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    return tmp_path


def test_a_budget_gives_the_most_slots_that_fit(capsys):
    status, report = plan(capsys, "qwen3-30b-a3b-fp8", "--device-memory", "12GiB", "--dtype", "bfloat16")
    chosen = report["plan"]
    assert chosen["total"] <= 12 * 2**30 < chosen["total"] + report["expert_bytes"]
    parts = [size for name, size in chosen.items() if name not in ("slots", "residency", "total", "pass_chunks")]
    assert sum(parts) == chosen["total"]
    assert report["least"]["slots"] == 8
    assert report["full"]["slots"] == report["experts"] == 48 * 128
    assert report["host_pool"] == report["experts"] * report["expert_bytes"]
    assert report["step_bytes_all_missing"] == 48 * 8 * report["expert_bytes"]
    assert status == (0 if report["fits"] else 1)


def test_it_says_what_loading_would_do(tiny, capsys):
    status, report = plan(capsys, tiny, "--residency", 0.5, "--batch", 2, "--context", 300)
    engine = tiny_engine(residency=0.5, max_batch=2, context=300)
    assert status == 0
    assert {**report["plan"], "total": None} == {**vars(engine.token_engine.plan), "total": None}
    assert report["plan"]["total"] == engine.token_engine.plan.total
    assert report["least"]["slots"] == 4


def test_speed_is_left_out_where_the_link_was_not_measured(tiny, capsys):
    _, report = plan(capsys, tiny)
    assert report["link_bandwidth"] is None
    assert report["step_seconds_all_missing"] is None


def test_what_does_not_fit_is_an_answer_with_status_1(tiny, capsys):
    status, report = plan(capsys, tiny, "--device-memory", "1MB")
    assert (status, report["fits"], report["plan"]) == (1, False, None)
    assert "needs at least" in report["reason"]
    assert report["least"]["total"] > 10**6
    assert main(["plan", str(tiny), "--device-memory", "1MB"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_people_get_lines(tiny, capsys):
    assert main(["plan", str(tiny), "--residency", "least"]) == 0
    out = capsys.readouterr().out
    assert "it fits: 2 slots (residency 0.125)" in out
    assert "16 experts" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--residency", "1.5"], "(0, 1]"),
        (["--batch", "9"], "1 to 8"),
        (["--context", "-3"], "context must be an integer from 1"),
        (["--dtype", "int4"], "dtype"),
        (["--device-memory", "much"], "memory size"),
    ],
)
def test_bad_options_are_one_line_and_status_2(tiny, capsys, arguments, words):
    assert main(["plan", str(tiny), *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_a_plan_needs_no_weights_but_a_model(tmp_path, capsys):
    assert main(["plan", str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_the_least_is_enough_as_a_budget(tiny, capsys):
    # Of enough layers: full load needs no staging, which takes more than all experts of a model of two layers.
    (tiny / "config.json").write_text(json.dumps(tiny_config(num_hidden_layers=16)))
    _, report = plan(capsys, tiny)
    status, again = plan(capsys, tiny, "--device-memory", report["least"]["total"])
    assert (status, again["plan"]) == (0, report["least"])
    assert plan(capsys, tiny, "--device-memory", report["least"]["total"] - 1)[0] == 1
