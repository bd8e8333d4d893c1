"""Checkpoints of training come back as they were written, or are named as damaged with what to delete."""

from __future__ import annotations

import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmoe_jax.errors import PredictorError
from seqmoe_jax.forecast.training.checkpoints import CHECKSUMS, Checkpoints
from seqmoe_jax.forecast.training.update import TrainState


def state(update):
    values = np.random.default_rng(update).normal(size=(64, 32))
    params = {"a": jnp.asarray(values, jnp.float32), "b": jnp.asarray(values[0], jnp.float32)}
    return TrainState(params, params, (jnp.zeros(3),), jnp.int32(update))


def same(got):
    expected, best, best_update, best_params, history = got
    assert (best, best_update, history) == (0.5, 1, [{"loss": 1.0}])
    jax.tree.map(np.testing.assert_array_equal, expected, state(2))
    jax.tree.map(np.testing.assert_array_equal, best_params, state(1).params)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run") / "student"
    checkpoints = Checkpoints(directory)
    for update in (1, 2):
        checkpoints.save(state(update), 0.5, 1, state(1).params, [{"loss": 1.0}])
    return directory


def test_the_latest_comes_back(written):
    same(Checkpoints(written).restore(state(0)))


def test_a_damaged_one_is_named(written, tmp_path, capfd):
    draw = random.Random(0)
    names = sorted(path.relative_to(written) for path in (written / "2").rglob("*") if path.is_file())
    for trial in range(14):
        copy = tmp_path / str(trial)
        shutil.copytree(written, copy)
        path = copy / draw.choice(names)
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data[: len(data) // 2] if trial % 4 == 0 else data)
        if trial % 7 == 0 and path.name != CHECKSUMS:
            path.unlink()
        with pytest.raises(PredictorError, match="delete that directory to go on from the one before it") as refused:
            Checkpoints(copy).restore(state(0))
        line = str(refused.value)
        assert line.startswith(f"{copy / '2'}: this checkpoint of training is damaged")
        assert "\n" not in line
    assert capfd.readouterr().err == ""


def test_one_whose_writer_was_killed_before_the_checksums_is_read(written, tmp_path):
    shutil.copytree(written, tmp_path / "run")
    (tmp_path / "run" / "2" / CHECKSUMS).unlink()
    same(Checkpoints(tmp_path / "run").restore(state(0)))


def test_without_it_the_one_before_is_taken(written, tmp_path):
    shutil.copytree(written, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "2")
    got = Checkpoints(tmp_path / "run").restore(state(0))
    jax.tree.map(np.testing.assert_array_equal, got[0], state(1))
