"""`seqmoe learn`: what it refuses before it begins, what it keeps when it is killed, what it installs."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from seqmoe_jax.cli import learn
from seqmoe_jax.cli.main import main
from seqmoe_jax.compilation import VARIABLE
from seqmoe_jax.errors import PromptError
from seqmoe_jax.forecast import store
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.evaluation import export
from seqmoe_jax.forecast.predictor import Predictor
from seqmoe_jax.models.families import spec_from_config
from seqmoe_jax.simulation import worth
from seqmoe_jax.testing import tiny_config, tiny_engine
from seqmoe_jax.traces.prompts import Prompt
from tests.forecast.traces import random_trace
from tests.simulation.oracle import noisy_oracle

SHAPE = {"layers": 2, "experts": 8, "active": 2}
TRACE = random_trace(lengths=(20,) * 6, vocabulary=12, split=["train"] * 4 + ["test"] * 2, **SHAPE)
CONFIG = PredictorConfig(
    model="tiny", **SHAPE, d_model=16, blocks=1, head_dim=8, d_state=4, vocabulary=12, token_rows=70, token_width=8,
    echo=16, refine_width=8,
)  # fmt: skip
SHAPES = nnx.eval_shape(lambda: Predictor(CONFIG, rngs=nnx.Rngs(0)).weights())


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A cache of its own, a file of prompts, and the words of the command."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr("seqmoe_jax.compilation.enable_compilation_cache", lambda: None)
    (tmp_path / "p.txt").write_text("ab\ncd\nef\ngh\n")
    return tmp_path


@pytest.fixture
def parts(place, monkeypatch):
    """Trace and training are there in no time; how often each was asked for."""
    asked = {"trace": 0, "train": 0}

    def traced(args, prompts, out):
        asked["trace"] += 1
        return TRACE

    def trained(args, trace, out, model):
        asked["train"] += 1
        store.save(out, CONFIG, jax.tree.map(lambda leaf: np.zeros(leaf.shape), SHAPES), np.arange(12), run={})
        return {"test": {"ours": {"recall_at": {"2": 0.5}}}}

    monkeypatch.setattr(learn, "_trace", traced)
    monkeypatch.setattr(learn, "_train", trained)
    monkeypatch.setattr(export, "forecasts_of", lambda *given, **options: noisy_oracle(given[2], flip=0.1, trigger=1))
    monkeypatch.setattr(worth, "pays", lambda rows: True)
    return asked


def run(place, *more):
    return main(["learn", "tiny", "--prompts", str(place / "p.txt"), "--json", *more])


def test_it_installs_what_auto_finds_and_does_nothing_twice(place, parts, capsys):
    assert run(place) == 0
    said = json.loads(capsys.readouterr().out)
    home = place / "cache" / "predictors" / "tiny"
    assert said["installed"] == str(home)
    assert store.choose_predictor("auto", "/models/TINY", **SHAPE) == home
    assert store.find_predictor("tiny", layers=3, experts=8, active=2) is None
    assert {row["setting"] for row in said["simulated"]} == {*worth.WITHOUT, *worth.WITH}
    assert run(place) == 0
    assert json.loads(capsys.readouterr().out) == said
    assert parts == {"trace": 1, "train": 1}


def test_another_run_is_refused_before_anything_is_loaded_unless_forced(place, parts, capsys):
    assert run(place) == 0
    assert run(place, "--updates", "3") == 2
    err = capsys.readouterr().err
    assert "has a predictor already, of another run (updates null there, 3 here): --force replaces it" in err
    assert parts["trace"] == 1
    assert run(place, "--updates", "3", "--force") == 0
    assert parts["trace"] == 2


@pytest.mark.parametrize("spoiled", ["{", "[]", '{"run": 3}', '{"run": {}}'])
def test_what_an_earlier_run_left_is_not_believed_where_it_is_damaged(place, parts, capsys, spoiled):
    assert run(place) == 0
    (place / "cache" / "predictors" / "tiny" / "learned.json").write_text(spoiled)
    assert run(place) == 2
    assert "--force replaces it" in capsys.readouterr().err
    assert run(place, "--force") == 0


def test_simulations_that_are_done_are_kept_when_it_is_killed(place, parts, capsys, monkeypatch):
    simulated, simulate = [], worth.simulate

    def killed(trace, config, forecasts):
        if len(simulated) == 3:
            raise KeyboardInterrupt
        simulated.append(config)
        return simulate(trace, config, forecasts)

    monkeypatch.setattr(worth, "simulate", killed)
    assert run(place) == 130
    assert not (place / "cache" / "predictors").exists()
    monkeypatch.setattr(worth, "simulate", lambda *given: simulated.append(given[1]) or simulate(*given))
    assert run(place) == 0
    assert len(simulated) == 16, "four settings, two residencies, two links, each once"


def test_what_does_not_pay_is_not_installed(place, parts, capsys, monkeypatch):
    monkeypatch.setattr(worth, "pays", lambda rows: False)
    assert run(place) == 0
    assert json.loads(capsys.readouterr().out)["installed"] is None
    assert store.find_predictor("tiny", **SHAPE) is None


def test_a_disk_without_room_is_found_before_the_trace(place, capsys, monkeypatch):
    model = SimpleNamespace(spec=spec_from_config(tiny_config()))
    engine = SimpleNamespace(token_engine=SimpleNamespace(model=model))
    monkeypatch.setattr(learn, "load_engine", lambda args, **options: engine)
    monkeypatch.setattr("seqmoe_jax.forecast.training.pipeline.needed_bytes", lambda *given: 1 << 60)
    monkeypatch.setattr(learn.trace, "recorded", None)
    assert run(place) == 2
    assert "free; make room, or write elsewhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ([None] * 2, "expected at least 3 prompts to learn from, and better hundreds, got 2"),
        (["train"] * 3, "one of another that is held out, got 3 of 'train'; without any 'split' a tenth"),
        (["train", "test", "test"], "two prompts or more of split 'train'"),
    ],
)
def test_prompts_that_nothing_can_be_learned_from_are_refused(splits, words):
    with pytest.raises(PromptError, match=words):
        learn.with_splits([Prompt(text="a", split=split) for split in splits], "p.txt")


def test_a_tenth_is_held_out_where_the_file_does_not_say():
    prompts, held = learn.with_splits([Prompt(text=str(i)) for i in range(25)], "p.txt")
    assert held == "test"
    assert [prompt.text for prompt in prompts if prompt.split == "test"] == ["0", "10", "20"]
    assert {prompt.split for prompt in prompts} == {"train", "test"}


@pytest.mark.slow
def test_all_of_it_on_a_tiny_model(place, capsys, monkeypatch):
    monkeypatch.setattr(learn, "load_engine", lambda args, **options: tiny_engine(policy="lru"))
    small = ("--width", "64", "--blocks", "1", "--updates", "4", "--training-batch", "2", "--max-new-tokens", "12")
    assert run(place, *small) == 0
    said = json.loads(capsys.readouterr().out)
    out = place / "cache" / "learning" / "tiny"
    assert {path.name for path in out.iterdir()} == {"trace.npz", "predictor", "simulated.json"}
    assert set(said["recall"]) == {"popularity", "repeat-last", "first-order", "activations+token"}
    assert store.read_config(out / "predictor").model == "tiny"
    assert set(said["seconds"]) == {"trace", "train", "judge"}
