"""Trace files: what is written is read back, and everything wrong with a file is one line."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from seqmoe_jax.errors import TraceError
from seqmoe_jax.traces.format import Trace, read_trace, write_trace


def arrays(steps=6, layers=2, experts=8, active=3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "ids": np.argsort(rng.random((steps, layers, experts)), axis=2)[..., :active].astype(np.uint8),
        "probs_u8": rng.integers(0, 255, (steps, layers, active), dtype=np.uint8),
        "tok": rng.integers(0, 50, steps, dtype=np.int32),
        "lens": np.array([4, 2]),
        "seq_offsets": np.array([0, 4, 6]),
        "num_experts": np.int32(experts),
        "layer_index": np.arange(layers),
        "vocab_size": np.int32(50),
        "split": np.array(["train", "test"]),
        "dataset": np.array(["a", "b"]),
    }


def read_changed(tmp_path, **changes) -> Trace:
    fields = arrays() | changes
    np.savez(tmp_path / "t.npz", **{name: value for name, value in fields.items() if value is not None})
    return read_trace(tmp_path / "t.npz")


def test_round_trip(tmp_path, excerpt):
    write_trace(tmp_path / "copy.npz", excerpt)
    copy = read_trace(tmp_path / "copy.npz")
    for field in dataclasses.fields(Trace):
        ours, theirs = getattr(excerpt, field.name), getattr(copy, field.name)
        if field.name == "metadata":
            assert ours.keys() == theirs.keys()
            assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
        else:
            assert np.array_equal(ours, theirs) or (ours is None and theirs is None)
    assert [path.name for path in tmp_path.iterdir()] == ["copy.npz"]


def test_a_trace_that_is_not_valid_is_not_written(tmp_path):
    trace = read_changed(tmp_path)
    with pytest.raises(TraceError, match="out of range"):
        write_trace(tmp_path / "out.npz", dataclasses.replace(trace, num_experts=4))
    assert not (tmp_path / "out.npz").exists()


def test_select_takes_whole_sequences(tmp_path):
    trace = read_changed(tmp_path)
    test = trace.select("test")
    assert (test.steps, test.sequences) == (2, 1)
    assert np.array_equal(test.ids, trace.ids[4:])
    assert test.seq_offsets.tolist() == [0, 2]
    assert test.metadata["dataset"].tolist() == ["b"]
    assert test.first_steps().tolist() == [True, False]


def test_activations_are_those_of_the_ids(tmp_path):
    trace = read_changed(tmp_path)
    active = trace.activations(1, 3)
    assert active.shape == (2, 2, 8)
    assert set(np.flatnonzero(active[0, 1])) == set(trace.ids[1, 1].tolist())


def test_weights_are_the_routers_shares_over_the_activated(tmp_path):
    trace = read_changed(tmp_path)
    weights = trace.weights(1, 3)
    np.testing.assert_allclose(weights.sum(axis=2), 1, rtol=1e-6)
    assert not weights[~trace.activations(1, 3)].any()
    chosen = np.take_along_axis(weights, trace.ids[1:3].astype(int), axis=2)
    shares = trace.probs_u8[1:3] / trace.probs_u8[1:3].sum(axis=2, keepdims=True)
    np.testing.assert_allclose(chosen, shares, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": None}, "missing ids"),
        ({"tok": None, "lens": None}, "missing tok, lens"),
        ({"ids": arrays()["ids"].astype(np.int64)}, "ids has dtype int64, expected uint8 or uint16"),
        ({"tok": arrays()["tok"].astype(np.int64)}, "tok has dtype int64"),
        ({"lens": np.array([4.0, 2.0])}, "lens has dtype float64"),
        ({"split": np.array([1, 2])}, "split has dtype"),
        ({"ids": np.zeros((6, 2), np.uint8)}, "expected \\(steps, layers, active experts\\)"),
        ({"ids": np.zeros((0, 2, 3), np.uint8)}, "the trace is empty"),
        ({"probs_u8": np.zeros((5, 2, 3), np.uint8)}, "probs_u8 has shape \\(5, 2, 3\\), expected \\(6, 2, 3\\)"),
        ({"tok": np.zeros(5, np.int32)}, "tok has shape"),
        ({"split": np.array(["train"])}, "split has shape"),
        ({"seq_offsets": np.array([0, 4, 5])}, "seq_offsets runs from 0 to 5, expected 0 to 6"),
        ({"lens": np.array([3, 3])}, "sequence 0 spans 4 steps in seq_offsets but 3 in lens"),
        ({"lens": np.array([6, 0])}, "at least one step"),
        ({"num_experts": np.int32(7)}, "expert id 7 at step . layer .|expert id 7 at step"),
        ({"num_experts": np.int32(2)}, "num_experts is 2, expected at least the 3 active"),
        ({"ids": np.ones((6, 2, 3), np.uint8)}, "an expert appears twice at step 0, layer 0"),
        ({"tok": np.full(6, 50, np.int32)}, "token id 50 is out of range: vocab_size is 50"),
        ({"tok": np.full(6, -1, np.int32)}, "token id -1 is negative"),
        ({"prefill_lens": np.array([5, 0])}, "prefill_lens"),
    ],
)
def test_faults_of_a_file(tmp_path, changes, message):
    with pytest.raises(TraceError, match=message) as caught:
        read_changed(tmp_path, **changes)
    assert "\n" not in str(caught.value)
    assert "t.npz" in str(caught.value)


def test_files_that_are_no_traces(tmp_path):
    with pytest.raises(TraceError, match="expected a trace file, got no such file"):
        read_trace(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(TraceError, match="no readable npz"):
        read_trace(tmp_path / "text.npz")
    write = tmp_path / "cut.npz"
    np.savez(write, **arrays())
    write.write_bytes(write.read_bytes()[:400])
    with pytest.raises(TraceError, match="no readable npz"):
        read_trace(write)


def test_splits_that_are_not_there(tmp_path):
    trace = read_changed(tmp_path)
    with pytest.raises(TraceError, match="no split 'dev': expected one of 'test', 'train'"):
        trace.select("dev")
    with pytest.raises(TraceError, match="has no splits"):
        read_changed(tmp_path, split=None).select("test")
