"""What a notebook can ask of traces and plans, and how they show themselves."""

from pathlib import Path

import pytest

import seqmoe_jax as sm

EXCERPT = Path(__file__).parent / "data" / "gptoss20b_excerpt.npz"


@pytest.fixture(scope="module")
def excerpt():
    return sm.Trace.load(EXCERPT)


@pytest.fixture
def evaluation():
    row = {"recall_at": {str(k): 0.6 for k in range(4, 9)}, "per_layer": [0.6] * 10, "steps": 100, "rollout": [0.5],
           "short": None, "long": 0.6}  # fmt: skip
    return sm.Evaluation(rows={"first-order": row}, split="test")


def test_a_line_in_the_terminal_and_a_table_in_the_notebook(excerpt, evaluation):
    plan = sm.plan("qwen3-30b-a3b-fp8", device_memory="12GiB", dtype="bfloat16")
    result = sm.simulate(excerpt, 0.45)
    for each in (plan, evaluation, result):
        assert len(repr(each)) < 300
        assert "\n" not in repr(each)
        assert each is result or each._repr_html_().startswith("<div>")
    assert (plan.slots, plan.host_bytes) == (plan.report["plan"]["slots"], plan.report["host_pool"])
    assert str(plan).startswith("qwen3-30b-a3b-fp8: qwen3_moe")


def test_simulations_take_names_and_numbers(excerpt, no_type_checks):
    half = sm.simulate(excerpt, 0.5, skip=50)
    assert half.hit_rate > sm.simulate(excerpt, 0.25, skip=50).hit_rate
    ahead = sm.simulate(
        excerpt, 0.5, "seqmoe", "seqmoe", predictor="first-order", skip=50, transfer_cost=2.0, beyond=True
    )
    assert ahead.transfers_per_step > half.transfers_per_step
    for arguments, error, said in [
        (dict(residency=1.5), sm.ConfigError, "residency must be in"),
        (dict(residency="half"), sm.ConfigError, "residency must be float"),
        (dict(residency=0.5, policy="best"), sm.ConfigError, "unknown policy 'best'"),
        (dict(residency=0.5, rho=2), sm.ConfigError, "no setting 'rho'"),
        (dict(residency=0.5, policy="seqmoe"), sm.ConfigError, "needs forecasts"),
        (dict(residency=0.5, policy="seqmoe", predictor="none.d"), sm.PredictorError, "none.d"),
        (dict(residency=0.5, split="dev"), sm.TraceError, "no split 'dev'"),
    ]:
        with pytest.raises(error, match=said):
            sm.simulate(excerpt, **arguments)
    with pytest.raises(sm.TraceError, match=r"Trace\.load"):
        sm.simulate(str(EXCERPT), 0.5)


def test_figures_are_shown_by_themselves(excerpt, evaluation):
    pytest.importorskip("matplotlib")
    figure = sm.plots.hit_rate(excerpt, residencies=[0.45], policies=["lru", "belady"], skip=50)
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert "24 layers, 32 experts" in figure.axes[0].get_title()
    assert "split test" in sm.plots.recall(evaluation).axes[0].get_title()
    with pytest.raises(sm.ConfigError, match="sequence must be from 0"):
        sm.plots.heatmap(excerpt, 10**6)


def test_what_is_no_model_is_one_line(no_type_checks):
    with pytest.raises(sm.CheckpointError, match=r"got dict; a Flax NNX module goes to from_nnx"):
        sm.load({})
