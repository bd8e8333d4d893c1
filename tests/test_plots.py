"""Plots are drawn from what the commands write; what is drawn is said in JSON; without matplotlib one clear line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from seqmoe_jax.cli.main import main

EXCERPT = str(Path(__file__).parent / "data" / "gptoss20b_excerpt.npz")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Of few pixels: what is drawn is looked at in other ways."""
    monkeypatch.setattr("seqmoe_jax.plots.DPI", 20)


def row(level: float, **more) -> dict:
    return {
        "recall_at": {str(k): level for k in range(4, 9)},
        "per_layer": [level] * 10,
        "steps": 100,
        **more,
    }


@pytest.fixture
def evaluation(tmp_path):
    refined = {"trigger": 5, "per_layer": [0.9] * 5}
    splits = {
        "test": {"predictors": {"first-order": row(0.6), "ours": row(0.85, refined=refined)}},
        "ood": {"predictors": {"first-order": row(0.5)}},
    }
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps({"splits": splits}))
    return path


def plot(capsys, *words) -> tuple[int, str, str]:
    status = main(["plot", *map(str, words)])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_recall_has_a_line_per_predictor_and_its_refinement(evaluation, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from seqmoe_jax.cli.plot import read_evaluation
    from seqmoe_jax.plots import recall

    assert plot(capsys, "recall", evaluation, "--out", tmp_path / "r.png")[:2] == (0, f"{tmp_path / 'r.png'}\n")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    axes = recall(*read_evaluation(evaluation)).axes[0]
    labels = [line.get_label() for line in axes.lines]
    assert labels == ["first-order (mean 60.0 %)", "ours (mean 85.0 %)", "refined at layer 5"]
    assert axes.lines[2].get_xdata().tolist() == [5, 6, 7, 8, 9]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("MoE layer", "recall (%)")
    assert "top 7" in axes.get_title()
    assert "split test" in axes.get_title()


def test_hit_rates_rise_with_residency_and_none_is_above_belady(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    words = ["hit-rate", EXCERPT, "--residencies", 0.45, 0.15, "--policies", "lru", "belady", "--json"]
    status, out, _ = plot(capsys, *words, "--out", tmp_path / "h.svg")
    said = json.loads(out)
    assert status == 0
    assert said["residencies"] == [0.15, 0.45]
    rates = np.array([said["hit_rates"]["lru"], said["hit_rates"]["belady"]])
    assert (rates[:, 1] > rates[:, 0]).all()
    assert (rates[1] > rates[0]).all()
    assert "<svg" in (tmp_path / "h.svg").read_text()


def test_the_heat_map_shows_shares_that_sum_to_k(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from seqmoe_jax.plots import heatmap
    from seqmoe_jax.traces.format import read_trace

    assert plot(capsys, "heatmap", EXCERPT, "--sequence", 1, "--out", tmp_path / "m.png")[0] == 0
    trace = read_trace(EXCERPT)
    left, right = heatmap(trace, 1).axes[:2]
    np.testing.assert_allclose(left.images[0].get_array().sum(1), 100 * trace.active, rtol=1e-4)
    assert right.images[0].get_array().shape == (trace.layers * trace.num_experts, trace.lens[1])


def measured(name: str, residency: float, speed: float, shares: dict | None) -> dict:
    return {
        "name": name, "residency": residency, "batch": 1, "tokens_per_second": speed, "spread": [speed - 9, speed + 5],
        "step_us": 1e6 / speed, "shares": shares,
    }  # fmt: skip


def test_a_benchmark_has_a_line_per_setting_and_a_stack_per_profile(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from seqmoe_jax.plots import bench

    times = {"compute": 1500.0, "predictor": 150.0, "management": 200.0, "stall": 2500.0, "other": 20.0, "idle": 900.0}
    shares = {"us_per_step": times, "share": {name: us / 4370 for name, us in times.items() if name != "idle"}}
    rows = [
        measured("full", 1.0, 650, None),
        measured("dma", 0.45, 230, shares),
        measured("dma", 0.25, 100, {"error": "no device"}),
        {"name": "lru", "residency": 0.25, "batch": 1, "error": "out of memory"},
    ]
    result = {"model": "m", "device": "d", "repeats": 3, "rows": rows}
    (tmp_path / "b.json").write_text(json.dumps(result))
    assert plot(capsys, "bench", tmp_path / "b.json", "--out", tmp_path / "b.png")[:2] == (0, f"{tmp_path / 'b.png'}\n")
    left, right = bench(result).axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["full load", "dma"]
    assert [bar.get_width() for bar in right.patches] == pytest.approx([1.5, 0.15, 0.2, 2.5, 0.02])
    assert right.lines[0].get_xdata()[0] == pytest.approx(1e3 / 230)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["heatmap", EXCERPT, "--out", "x.bmp"], "expected a name that ends in .png, .svg, .pdf"),
        (["heatmap", EXCERPT, "--out", "no/x.png"], ": no directory "),
        (["heatmap", EXCERPT, "--out", "x.png", "--sequence", "999"], "--sequence must be from 0 to"),
        (["heatmap", "none.npz", "--out", "x.png"], "expected a trace file, got no such file"),
        (
            ["hit-rate", EXCERPT, "--out", "x.png", "--residencies", "2"],
            "--residencies: must be above 0 and at most 1, got 2",
        ),
        (["recall", "none.json", "--out", "x.png"], "none.json: expected a JSON file, got no such file"),
        (["bench", EXCERPT, "--out", "x.png"], "expected UTF-8 JSON"),
        (["recall", EXCERPT, "--out", "x.png"], "expected UTF-8 JSON"),
        (["bench", "EVALUATION", "--out", "x.png"], "expected the JSON of `seqmoe bench --out`"),
        (["recall", "EVALUATION", "--out", "EVALUATION"], "expected a name that ends in .png"),
        (["recall", "EVALUATION", "--out", "photo.png"], "photo.png is there already and is no figure"),
        (["heatmap", EXCERPT, "--out", "."], "is a directory"),
        (["recall", "EVALUATION", "--out", "x.png", "--split", "dev"], "has no split 'dev': expected one of test, ood"),
    ],
)
def test_faults_are_one_line(evaluation, tmp_path, monkeypatch, capsys, words, message):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photo.png").write_bytes(b"\x89PNG and so on")
    status, out, err = plot(capsys, *[str(evaluation) if word == "EVALUATION" else word for word in words])
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_a_figure_replaces_the_same_figure_alone(evaluation, tmp_path, capsys, kind):
    pytest.importorskip("matplotlib")
    words = ["recall", evaluation, "--out", tmp_path / f"r.{kind}"]
    assert plot(capsys, *words)[0] == 0
    again = plot(capsys, *words)
    assert again[0] == 0, again[2]  # the same again
    status, _, err = plot(capsys, *words, "--split", "ood")
    assert (status, 'figure of `seqmoe plot` of another run (split null there, "ood" here)' in err) == (2, True), err
    assert plot(capsys, "heatmap", EXCERPT, "--out", tmp_path / f"r.{kind}")[0] == 2
    assert plot(capsys, *words, "--split", "ood", "--force")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evaluation.json", f"r.{kind}"]


def test_the_run_of_a_figure_ends_where_it_ends(tmp_path):
    from seqmoe_jax.plots import read_run

    (tmp_path / "r.png").write_bytes(b"\x89PNG seqmoe-run:%7B%22kind%22%3A%20%22recall%22%7D;A checksum follows")
    assert read_run(tmp_path / "r.png") == {"kind": "recall"}


def test_names_with_dollars_are_no_formulas(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "e.json").write_text(json.dumps({"predictors": {"$\\frac{": row(0.6)}}))
    assert plot(capsys, "recall", tmp_path / "e.json", "--out", tmp_path / "r.svg")[0] == 0
    assert "$" in (tmp_path / "r.svg").read_text()


@pytest.mark.parametrize(
    "damaged", [{"predictors": []}, {"predictors": {"a": []}}, {"splits": []}, {"splits": {"a": 3}},
                {"predictors": {"a": row(float("nan"))}}, {"predictors": {"a": row(0.5, refined={"trigger": 1e9})}},
                {"rows": 3}, {"rows": [3]}, {"rows": [{"name": "lru"}], "model": "m", "device": "d", "repeats": 1}],
)  # fmt: skip
def test_damaged_results_are_one_line(tmp_path, capsys, damaged):
    pytest.importorskip("matplotlib")
    (tmp_path / "d.json").write_text(json.dumps(damaged))
    for kind in ("recall", "bench"):
        status, out, err = plot(capsys, kind, tmp_path / "d.json", "--out", tmp_path / "r.svg")
        assert (status, out, len(err.splitlines())) == (2, "", 1), err
        assert "d.json" in err


def test_without_matplotlib_it_says_what_to_install(evaluation, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, _, err = plot(capsys, "recall", evaluation, "--out", tmp_path / "r.png")
    assert status == 2
    assert "pip install 'seqmoe-jax[plot]'" in err
