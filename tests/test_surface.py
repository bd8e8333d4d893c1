"""What a notebook shows of the package's objects, and what it can ask of an engine and a trace."""

from pathlib import Path

import numpy as np
import pytest

import seqmoe_jax as sm
from seqmoe_jax.testing import tiny_engine

EXCERPT = Path(__file__).parent / "data" / "gptoss20b_excerpt.npz"
PROMPT = "an expert"


@pytest.fixture(scope="module")
def engine():
    with tiny_engine(residency=0.4) as engine:
        yield engine


@pytest.fixture(scope="module")
def excerpt():
    return sm.Trace.load(EXCERPT)


@pytest.fixture(scope="module")
def trace(engine):
    return sm.Trace.record(engine, [PROMPT, list(b"a slot <b>")], max_new_tokens=5, splits=["train", "test"])


@pytest.fixture
def evaluation():
    row = {"recall_at": {str(k): 0.6 for k in range(4, 9)}, "per_layer": [0.6] * 10, "steps": 100, "rollout": [0.5],
           "short": None, "long": 0.6}  # fmt: skip
    return sm.Evaluation(rows={"first-order": row}, split="test")


def test_a_line_in_the_terminal_and_a_table_in_the_notebook(engine, trace, excerpt, evaluation):
    out = engine.generate(PROMPT, max_new_tokens=3)
    plan = sm.plan("qwen3-30b-a3b-fp8", device_memory="12GiB", dtype="bfloat16")
    result = sm.simulate(excerpt, 0.45)
    shown = [engine, out, out.stats, plan, trace, evaluation, result]
    for each in shown:
        assert len(repr(each)) < 300
        assert "\n" not in repr(each)
        assert "object at 0x" not in repr(each)
        assert result is each or each._repr_html_().startswith("<div>")
    assert len(repr(engine.token_engine.model.weights)) < 100
    assert len(repr(engine.token_engine.model)) < 300
    assert "residency (6 slots): 37.5 %" in engine._repr_html_()
    assert str(out) == out.text
    assert (plan.slots, plan.host_bytes) == (plan.report["plan"]["slots"], plan.report["host_pool"])
    assert str(plan).startswith("qwen3-30b-a3b-fp8: qwen3_moe")


def test_what_a_notebook_shows_is_escaped(engine):
    out = engine.generate(PROMPT, max_new_tokens=1)
    shown = sm.Generation(text="<script>", reasoning="", tokens=[1], finish_reason="length", stats=out.stats)
    assert "&lt;script&gt;" in shown._repr_html_()
    assert "<script>" not in shown._repr_html_()


def test_a_closed_engine_says_so():
    engine = tiny_engine()
    engine.close()
    assert repr(engine) == "Engine(closed)"
    assert "closed" in engine._repr_html_()


def test_logits_are_those_that_generation_follows_at_any_residency(engine):
    out = engine.generate(PROMPT, max_new_tokens=6)
    tokens = [*PROMPT.encode(), *out.tokens]
    logits = engine.logits(tokens[:-1])
    assert engine.generate(PROMPT, max_new_tokens=6).tokens == out.tokens  # reading has broken nothing
    assert logits.shape == (len(tokens) - 1, 256)
    assert logits.dtype == np.float32
    assert logits[len(PROMPT) - 1 :].argmax(1).tolist() == out.tokens
    with tiny_engine(residency=1.0) as full:
        np.testing.assert_array_equal(logits, full.logits(np.array(tokens[:-1])))


def test_routing_is_what_a_trace_records(engine, trace):
    where = engine.routing(trace.tok[: trace.lens[0]])
    assert (where.ids.shape, where.weights.shape) == ((trace.lens[0], 2, 2), (trace.lens[0], 2, 2))
    assert (np.sort(where.ids, axis=2) == np.sort(trace.ids[: trace.lens[0]], axis=2)).all()
    np.testing.assert_allclose(where.weights.sum(2), 1, rtol=1e-5)
    with pytest.raises(sm.PromptError, match="empty"):
        engine.routing([])


def test_a_trace_is_recorded_saved_loaded_and_divided(engine, trace, tmp_path):
    trace.save(tmp_path / "t.npz")
    again = sm.Trace.load(tmp_path / "t.npz")
    assert again.digest == trace.digest
    assert trace.model == "tiny"
    assert trace.prefill_lens.tolist() == [len(PROMPT), 10]
    assert trace.select("test").tok[:10].tolist() == list(b"a slot <b>")
    np.testing.assert_allclose(trace.popularity().sum(1), 2, rtol=1e-6)
    written = sm.Trace.record(engine, [PROMPT], tmp_path / "one.npz", max_new_tokens=5)
    assert (written.digest, written.split) == (sm.Trace.load(tmp_path / "one.npz").digest, None)
    for prompts, more, said in [
        ("text", {}, "list of prompts to record, got text"),
        ([], {}, "got none"),
        ([PROMPT], {"splits": ["a", "b"]}, "a split for each of 1 prompts, got 2"),
        ([PROMPT], {"max_new_tokens": 1}, "at least 2"),
    ]:
        with pytest.raises(sm.PromptError, match=said):
            sm.Trace.record(engine, prompts, **more)


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
