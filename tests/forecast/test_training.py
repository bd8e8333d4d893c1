"""Training learns, stops, resumes; the stored predictor is the trained one; the commands tie it together."""

import argparse
import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

from seqmoe_jax.cli import predictor as command
from seqmoe_jax.cli.main import main
from seqmoe_jax.errors import OutputError, PredictorError, TraceError
from seqmoe_jax.forecast import store
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.data import prepare
from seqmoe_jax.forecast.evaluation.baselines import baselines
from seqmoe_jax.forecast.evaluation.evaluate import evaluate_baseline, evaluate_predictor, table
from seqmoe_jax.forecast.evaluation.export import forecasts_of
from seqmoe_jax.forecast.features import token_table
from seqmoe_jax.forecast.predictor import Predictor, weights_of
from seqmoe_jax.forecast.training import pipeline
from seqmoe_jax.forecast.training.config import TrainConfig
from seqmoe_jax.forecast.training.fit import fit
from seqmoe_jax.traces.format import write_trace
from tests.forecast.traces import random_trace

SHAPE = {"layers": 3, "experts": 8, "active": 2, "vocabulary": 12}
TRACE = random_trace(lengths=(40,) * 12, split=["train"] * 9 + ["test"] * 3, **SHAPE)
TABLE = token_table(TRACE.select("train").tok, 12)
CONFIG = PredictorConfig(
    model="some/model", layers=3, experts=8, active=2, d_model=16, blocks=1, head_dim=8, d_state=4, vocabulary=12,
    token_rows=int(TABLE.max()) + 1, token_width=8, echo=16, refine_width=8,
)  # fmt: skip
TRAINING = TrainConfig(batch=4, window=64, validate_every=20, warmup=5, bfloat16=False, updates=120, learning_rate=1e-2)


@pytest.fixture(scope="module")
def steps():
    return prepare(TRACE.select("train"), CONFIG, TABLE), prepare(TRACE.select("test"), CONFIG, TABLE)


@pytest.fixture(scope="module")
def weights():
    return Predictor(CONFIG, rngs=nnx.Rngs(0)).weights()


@pytest.fixture(scope="module")
def trained(steps):
    return fit(CONFIG, TRAINING, *steps)


@pytest.mark.slow
def test_training_finds_what_the_token_tells(trained, steps):
    weights = weights_of(CONFIG, jax.tree.map(jax.numpy.asarray, trained.params))
    row = evaluate_predictor(CONFIG, weights, steps[1])
    said = forecasts_of(CONFIG, weights | {"token_table": TABLE}, TRACE.select("test"), rollout=0)
    assert abs(float(said.next.sum(-1).mean()) - 2) < 0.4, "probabilities of being routed sum to about K"
    fitted = baselines(TRACE.select("train"))
    others = {name: evaluate_baseline(CONFIG, scores, steps[1]) for name, scores in fitted.items()}
    assert row["recall_at"]["5"] > 0.85 > others["first-order"]["recall_at"]["5"]
    assert row["steps"] == 3 * 39, "the first step of a sequence has no routing before it"
    assert row["rollout"][0] == pytest.approx(row["recall_at"]["5"], abs=2e-4)
    assert row["rollout"][1] < row["rollout"][0], "without its token a step is harder to forecast"
    assert list(row["recall_at"]) == ["2", "3", "4", "5", "6"]
    assert len(row["per_layer"]) == 3
    assert "first-order" in table(others | {"ours": row})


def test_a_stored_predictor_forecasts_the_same(weights, tmp_path):
    paths = store.save(tmp_path, CONFIG, weights, TABLE, part_bytes=4000)
    assert len(paths) > 1
    config, loaded = store.load(tmp_path)
    assert config == CONFIG
    np.testing.assert_array_equal(loaded["token_table"], TABLE)
    held = TRACE.select("test")
    said = forecasts_of(config, loaded, held, rollout=2)
    said.check(held)
    exact = forecasts_of(config, weights | {"token_table": TABLE}, held, rollout=2)
    np.testing.assert_allclose(said.next, exact.next, atol=0.05)
    paths[1].unlink()
    with pytest.raises(PredictorError, match="parts of one predictor, found"):
        store.load(tmp_path)
    paths[0].write_bytes(b"nothing")
    with pytest.raises(PredictorError, match="not a predictor file"):
        store.load(tmp_path)


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(steps, tmp_path):
    training = dataclasses.replace(TRAINING, updates=60)
    whole = fit(CONFIG, training, *steps, checkpoints=tmp_path / "a")
    fit(CONFIG, training, *steps, checkpoints=tmp_path / "b", stop=40)
    lines = []
    rest = fit(CONFIG, training, *steps, checkpoints=tmp_path / "b", log=lines.append)
    assert lines[0] == "resuming after update 40"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), whole.params, rest.params)


@pytest.mark.slow
def test_scheduled_sampling_and_teachers(trained, steps):
    weights = weights_of(CONFIG, jax.tree.map(jax.numpy.asarray, trained.params))
    teachers = jax.tree.map(lambda value: np.stack([value, value]), trained.params)
    training = dataclasses.replace(TRAINING, updates=20, learning_rate=2e-3, sampling=0.1)
    result = fit(CONFIG, training, *steps, weights=weights, teachers=teachers)
    assert result.history[-1]["recall"] > 0.7


def parse(add, *words):
    parser = argparse.ArgumentParser()
    add(parser)
    return parser.parse_args([str(word) for word in words])


@pytest.mark.slow
def test_commands(tmp_path, capsys, monkeypatch):
    write_trace(tmp_path / "T.npz", TRACE)
    small = ("--width", 64, "--blocks", 1, "--updates", 10, "--batch", 2, "--model", "some/model", "--json")
    args = parse(command.add_train_arguments, tmp_path / "T.npz", "--out", tmp_path / "p", *small)
    assert command.train(args) == 0
    capsys.readouterr()
    words = (tmp_path / "T.npz", "--predictor", tmp_path / "p", "--model", "some/model", "--json")
    assert command.evaluate(parse(command.add_evaluate_arguments, *words)) == 0
    said = json.loads(capsys.readouterr().out)
    names = {"popularity", "repeat-last", "first-order", "activations+token"}
    assert set(said["predictors"]) == names
    assert said["cost"]["parameters"] > 0
    kept = json.loads((tmp_path / "p" / "evaluation.json").read_text())
    assert set(kept["splits"]["test"]["predictors"]) == names
    assert kept["splits"]["test"]["predictors"]["activations+token"] == said["predictors"]["activations+token"]
    assert kept["cost"] == said["cost"]
    config, weights = store.load(tmp_path / "p")
    assert (config.model, config.layers, config.experts, config.active) == ("some/model", 3, 8, 2)
    np.testing.assert_allclose(weights["popularity"], TRACE.select("train").popularity(), atol=2e-3)
    assert {path.name for path in tmp_path.iterdir()} == {"T.npz", "p"}, "the checkpoints are gone"
    # Done already: a second run trains nothing, and one of another seed is refused.
    monkeypatch.setattr(pipeline, "fit", None)
    assert command.train(args) == 0
    assert json.loads(capsys.readouterr().out) == kept
    jax.tree.map(np.testing.assert_array_equal, store.load(tmp_path / "p")[1], weights)
    args.seed = 1
    with pytest.raises(OutputError, match=r"a predictor of another run \(seed 0 there, 1 here\)"):
        command.train(args)


@pytest.mark.slow
def test_a_predictor_learns_from_teachers_and_stops_where_it_is_told(tmp_path):
    write_trace(tmp_path / "T.npz", TRACE)
    small = ("--width", 64, "--blocks", 1, "--updates", 8, "--batch", 2, "--sampled-updates", 0, "--json")
    options = ("--inputs", "activations", "--teachers", 2, "--stop-at", 0.5)
    args = parse(command.add_train_arguments, tmp_path / "T.npz", "--out", tmp_path / "p", *small, *options)
    assert command.train(args) == 0
    kept = json.loads((tmp_path / "p" / "evaluation.json").read_text())
    assert kept["updates"] == {"teacher-0": 4, "teacher-1": 4, "distilled": 6}
    assert store.read_config(tmp_path / "p").inputs == "activations"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--updates", "0"), "--updates: must be from 1"),
        (("--refine-width", "0"), "--refine-width: must be from 1"),
        (("--learning-rate", "2"), "--learning-rate: must be above 0 and at most 1"),
        (("--learning-rate", "nan"), "--learning-rate: must be a number"),
        (("--width", "0"), "--width: must be from 1"),
        (("--width", "20"), "multiple of head"),
        (("--teachers", "-1"), "--teachers: must be from 0"),
        (("--stop-at", "2"), "--stop-at: must be above 0 and at most 1"),
        (("--seed", "9" * 30), "--seed: must be from 0"),
    ],
)
def test_faults_of_training_are_said_before_it_begins(tmp_path, capsys, words, message):
    write_trace(tmp_path / "T.npz", TRACE)
    assert main(["train-predictor", str(tmp_path / "T.npz"), "--out", str(tmp_path / "p"), *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "p").exists()


def test_a_trace_without_a_second_step_is_refused(tmp_path):
    short = random_trace(lengths=(1,) * 12, split=["train"] * 12, **SHAPE)
    write_trace(tmp_path / "T.npz", short)
    with pytest.raises(PredictorError, match="sequences of at least 2 steps"):
        command.train(parse(command.add_train_arguments, tmp_path / "T.npz", "--out", tmp_path / "p"))


def test_errors_are_one_line(tmp_path):
    write_trace(tmp_path / "T.npz", TRACE)
    with pytest.raises(PredictorError, match="no predictor here"):
        command.evaluate(parse(command.add_evaluate_arguments, tmp_path / "T.npz", "--predictor", tmp_path))
    with pytest.raises(PredictorError, match="no predictor ships for model 'a/b'"):
        command.evaluate(
            parse(command.add_evaluate_arguments, tmp_path / "T.npz", "--predictor", "auto", "--model", "a/b")
        )
    with pytest.raises(PredictorError, match="needs a model"):
        command.evaluate(parse(command.add_evaluate_arguments, tmp_path / "T.npz", "--predictor", "auto"))
    with pytest.raises(TraceError, match="no split 'dev'"):
        command.evaluate(parse(command.add_evaluate_arguments, tmp_path / "T.npz", "--split", "dev"))
    with pytest.raises(PredictorError, match="is for model 'some/model', got 'x'"):
        CONFIG.check(layers=3, experts=8, active=2, model="x")
    with pytest.raises(PredictorError, match="field 'model' is missing"):
        PredictorConfig.from_dict({"layers": 3})
    with pytest.raises(PredictorError, match="inputs must be one of"):
        dataclasses.replace(CONFIG, inputs="tokens")
