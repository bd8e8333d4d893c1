"""Stretched routing is the recorded one, seen again in other layers, streams and groups of experts."""

import json

import numpy as np
import pytest

from seqmoe_jax.cli.main import main
from seqmoe_jax.traces.format import read_trace, write_trace
from seqmoe_jax.traces.stretch import stretch
from tests.traces.conftest import EXCERPT


@pytest.fixture(scope="module")
def trace(excerpt):
    return excerpt


@pytest.fixture(scope="module")
def stretched(trace):
    return stretch(trace, layers=2 * trace.layers, experts=128, active=8)


def test_the_own_shape_is_the_trace_itself(trace):
    assert stretch(trace, **trace.sizes) is trace


def test_the_first_stream_of_the_first_layers_is_the_sequence_itself(trace, stretched):
    mine = stretched.ids[:, : trace.layers]
    mine = mine[stretched.ids[:, : trace.layers] // 32 % 2 == 0].reshape(trace.ids.shape)  # groups 0 and 2
    np.testing.assert_array_equal(np.sort(mine % 32, -1), np.sort(trace.ids, -1))


def test_other_layers_are_those_of_another_sequence_of_the_split(trace, stretched):
    """The partner is the next longer one: read from its beginning, again and again."""
    lens, split = trace.lens, trace.split
    members = np.flatnonzero(split == "test")
    members = members[np.argsort(lens[members], kind="stable")]
    streams = 2
    for place, sequence in enumerate(members):
        partner = members[(place + streams) % len(members)]
        start, stop = trace.spans()[sequence]
        other = trace.ids[slice(*trace.spans()[partner])]
        expected = other[np.arange(stop - start) % len(other)]
        found = stretched.ids[start:stop, trace.layers :]
        found = found[found // 32 % 2 == 0].reshape(expected.shape)
        np.testing.assert_array_equal(np.sort(found % 32, -1), np.sort(expected, -1))


def test_every_group_is_used_and_the_heaviest_come_first(stretched, tmp_path):
    assert set(np.unique(stretched.ids // 32)) == {0, 1, 2, 3}
    assert (np.diff(stretched.probs_u8.astype(int), axis=-1) <= 0).all()
    write_trace(tmp_path / "s.npz", stretched)  # which checks it
    assert read_trace(tmp_path / "s.npz").sizes == {"layers": 48, "experts": 128, "active": 8}


def test_of_a_stream_that_is_not_wholly_needed_the_heaviest_experts_are_taken(trace, tmp_path):
    six, eight = (stretch(trace, layers=trace.layers, experts=256, active=active) for active in (6, 8))
    write_trace(tmp_path / "s.npz", six)  # which checks it
    both = (six.ids[..., None] == eight.ids[..., None, :]).any(-1)
    assert both.all(), "six of the eight"
    second = [part.ids[part.ids // 32 % 2 == 1].reshape(trace.steps, trace.layers, -1) for part in (six, eight)]
    assert [part.shape[-1] for part in second] == [2, 4]
    np.testing.assert_array_equal(second[0], second[1][..., :2])


def test_fewer_layers_are_the_first_ones(trace):
    np.testing.assert_array_equal(stretch(trace, layers=3, experts=32, active=4).ids, trace.ids[:, :3])


def test_the_command_writes_the_stretched_trace(trace, stretched, tmp_path, capsys):
    path, out = str(EXCERPT), tmp_path / "s.npz"
    words = ["stretch-trace", path, "--layers", "48", "--experts", "128", "--active", "8", "--out", str(out)]
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["model"], said["layers"], said["steps"]) == ("stretched-48x128x8", 48, trace.steps)
    np.testing.assert_array_equal(read_trace(out).ids, stretched.ids)
    train = int(trace.lens[trace.split == "train"].sum())
    assert main([*words, "--json"]) == 0, "the same again"
    fewer = [*words, "--train-steps", str(train // 2), "--model", "mine"]
    assert main(fewer) == 2
    assert "has a trace of another run" in capsys.readouterr().err
    assert main([*fewer, "--force"]) == 0
    fewer = read_trace(out)
    assert fewer.model == "mine"
    assert 0 < fewer.lens[fewer.split == "train"].sum() < train
    assert fewer.select("test").steps == trace.select("test").steps, "other splits are kept whole"
    assert main([*words[:-2], "--active", "3", "--out", str(tmp_path / "no.npz")]) == 2
    assert "cannot be stretched" in capsys.readouterr().err
    assert not (tmp_path / "no.npz").exists()
