"""A run that is killed, wherever that is, and then run again ends with the very files of one that was not."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flax import nnx

from seqmoe_jax.cli.trace import encode
from seqmoe_jax.forecast.predictor import Predictor
from seqmoe_jax.forecast.training import pipeline
from seqmoe_jax.forecast.training.config import TrainConfig
from seqmoe_jax.forecast.training.fit import TrainResult
from seqmoe_jax.testing import tiny_engine
from seqmoe_jax.traces import record as recording
from seqmoe_jax.traces.prompts import Prompt
from seqmoe_jax.traces.record import Recording
from tests.forecast.traces import random_trace

EXCERPT = Path(__file__).parent.parent / "data" / "gptoss20b_excerpt.npz"
CALLS = ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir")  # whatever changes what a directory holds


class Killed(BaseException):
    pass


def killed_at(monkeypatch, work, call):
    """Does the work as a process that is killed at the `call`th change of a directory: what is done in `finally` fails
    too. Returns whether it lived."""
    left = [call]

    def dying(function):
        def instead(*args, **options):
            left[0] -= 1
            if left[0] <= 0:
                raise Killed
            return function(*args, **options)

        return instead

    with monkeypatch.context() as patched:
        for name in CALLS:
            patched.setattr(os, name, dying(getattr(os, name)))
        try:
            work()
        except Killed:
            return False
    return True


def contents(directory):
    """What every file below holds, by name."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


STEPS = pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])


def check_kills(tmp_path, monkeypatch, work, step):
    """At every `step`th point there is, killed and run again, and then killed at a point of what was left."""
    whole = tmp_path / "whole"
    whole.mkdir()
    work(whole)
    expected = contents(whole)
    points = 0
    for call in range(1 if step == 1 else random.randrange(1, step + 1), 1000, step):
        each = tmp_path / f"killed-{call}"
        each.mkdir()
        if killed_at(monkeypatch, lambda each=each: work(each), call):
            break
        points += 1
        killed_at(monkeypatch, lambda each=each: work(each), call // 2 + 1)
        work(each)
        assert contents(each) == expected, f"killed at change {call}"
    assert points > 10 / step
    assert contents(each) == expected


@STEPS
def test_recordings(tmp_path, monkeypatch, step):
    monkeypatch.setattr(recording, "GROUP", 1)
    engine = tiny_engine(residency=0.5, policy="lru")
    prompts = [Prompt(text="once upon"), Prompt(text="x")]
    encoded = encode(engine, prompts, chat=False)

    def work(directory):
        out = directory / "T.npz"
        recording.record(engine.token_engine, prompts, encoded, Recording(max_new_tokens=3), out, model="tiny")

    check_kills(tmp_path, monkeypatch, work, step)


@STEPS
def test_trainings(tmp_path, monkeypatch, step):
    """All but the updates, which leave a file as checkpoints do."""
    trace = random_trace(lengths=(8,) * 12, layers=2, experts=4, active=1, vocabulary=12)

    def fit(config, training, steps, validation, *, seed, checkpoints, log, progress, stop, weights=None):
        checkpoints.mkdir(exist_ok=True)
        (checkpoints / "beginning").write_text("")
        os.replace(checkpoints / "beginning", checkpoints / "done")
        return TrainResult(nnx.state(Predictor(config, rngs=nnx.Rngs(seed)), nnx.Param), 1, [])

    monkeypatch.setattr(pipeline, "fit", fit)
    monkeypatch.setattr(pipeline, "recall_rows", lambda *args, **options: {"ours": {"recall": 0.5}})
    sizes = {"d_model": 16, "blocks": 1, "head_dim": 8, "d_state": 4, "token_width": 4, "echo": 4, "refine_width": 8}

    def work(directory):
        pipeline.train_predictor(
            trace, directory / "p", model="some/model", inputs="activations+token", sizes=sizes,
            training=TrainConfig(updates=4, bfloat16=False), seed=0, sampled_updates=1, teachers=0, stop_at=None,
            restart=False, force=False, log=lambda line: None, progress=quiet,
        )  # fmt: skip

    check_kills(tmp_path, monkeypatch, work, step)


class quiet:
    def __init__(self, name):
        pass

    def __enter__(self):
        return lambda done, updates: None

    def __exit__(self, *error):
        pass


def command(*words, directory, kill_after=None):
    """Runs a command, and kills it after some seconds. Returns whether it came to its end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "seqmoe_jax", *map(str, words)], cwd=directory, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        _, said = process.communicate(timeout=kill_after)
        assert process.returncode == 0, said
        return True
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return False


RUNS = {
    "trace": ["trace", "demo", "--prompts", "../p.txt", "--out", "T.npz", "--max-new-tokens", 24, "--temperature", 1,
              "--residency", 0.5],
    "train": ["train-predictor", EXCERPT, "--out", "p", "--width", 64, "--blocks", 1, "--token-width", 8,
              "--refine-width", 16, "--updates", 150, "--batch", 2, "--window", 32, "--seed", 3],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_commands_killed_at_random(tmp_path, name):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    (tmp_path / "p.txt").write_text("\n".join(f"Chapter {i} of the" for i in range(200)))
    (tmp_path / "whole").mkdir()
    begun = time.monotonic()
    command(*RUNS[name], directory=tmp_path / "whole")
    took = time.monotonic() - begun
    (tmp_path / "killed").mkdir()
    kills = 0
    while not command(*RUNS[name], directory=tmp_path / "killed", kill_after=rng.uniform(0.3, 1.0) * took):
        kills += 1
        assert kills < 100
    while kills < 3:  # a run may have come to its end too early
        (tmp_path / f"more-{kills}").mkdir()
        command(*RUNS[name], directory=tmp_path / f"more-{kills}", kill_after=rng.uniform(0.5, 0.95) * took)
        command(*RUNS[name], directory=tmp_path / f"more-{kills}")
        assert contents(tmp_path / f"more-{kills}") == contents(tmp_path / "whole")
        kills += 1
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert command(*RUNS[name], directory=tmp_path / "killed"), "the same once more"
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
