"""What an `npz` file says is checked before it is unpacked, and damaged or hostile ones are one line."""

from __future__ import annotations

import io
import os
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from seqmoe_jax.errors import MOST_LINE, TraceError
from seqmoe_jax.traces.archive import ALWAYS, read_arrays
from seqmoe_jax.traces.forecasts import read_forecasts
from seqmoe_jax.traces.format import read_trace


def npy(shape, descr="<i4", data=b""):
    """An array's bytes whose header says whatever it is told to."""
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def archive_of(path, members, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path


def patched(path, before, after):
    data = path.read_bytes()
    assert before in data
    path.write_bytes(data.replace(before, after))
    return path


def refusal(read, path):
    with pytest.raises(TraceError) as caught:
        read(path)
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) <= MOST_LINE
    return line


def plain(path):
    return read_arrays(path, "a file", lambda headers: None)


def test_plain_arrays_are_read(tmp_path):
    arrays = {"a": np.arange(6).reshape(2, 3).T, "b": np.array("text"), "c": np.zeros((0, 3), bool), "d": np.float16(2)}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "f.npz", **arrays)
        found = plain(tmp_path / "f.npz")
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].dtype == array.dtype


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (npy((10**15,)), "not the size of its"),
        (npy((10**15, 10**15)), "not the size of its"),
        (npy((-1,), data=b"1234"), "expected numbers or strings"),
        (npy((10**15,), "<U0"), "expected numbers or strings"),
        (npy((1,), "|O", b"12345678"), "expected numbers or strings"),
        (npy((1,), [("a", "<i4")], b"1234"), "expected numbers or strings"),
        (npy("x"), "shape is not valid"),
        (npy((1,), "<q9q", b"1"), "descr is not a valid dtype"),
        (npy((1,) * 20_000), "may not be safe"),
        (b"\x93NUMPY\x09\x00", "no readable npz file"),
        (b"not an array", "magic"),
        (b"", "magic"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_headers_are_checked_before_anything_is_unpacked(tmp_path, data, words):
    assert words in refusal(plain, archive_of(tmp_path / "f.npz", {"a": data}))


def test_damaged_data_is_named(tmp_path):
    path = tmp_path / "f.npz"
    np.savez_compressed(path, a=np.random.default_rng(0).integers(0, 9, 10_000))
    whole = path.read_bytes()
    for at in range(200, 2000, 100):
        path.write_bytes(whole[:at] + bytes(50) + whole[at + 50 :])
        assert "no readable npz file" in refusal(plain, path)
    path.write_bytes(whole[: len(whole) // 2])
    assert "no readable npz file" in refusal(plain, path)


def test_encrypted_and_unknown_methods_are_named(tmp_path):
    path = archive_of(tmp_path / "f.npz", {"a": npy((1,), data=b"1234")}, zipfile.ZIP_STORED)
    patched(path, b"PK\x01\x02\x14\x03\x14\x00\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01\x00")
    assert "encrypted" in refusal(plain, path)
    path = archive_of(tmp_path / "f.npz", {"a": npy((1,), data=b"1234")}, zipfile.ZIP_STORED)
    patched(path, b"PK\x01\x02\x14\x03\x14\x00\x00\x00\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x00\x00\x63\x00")
    assert "no readable npz file" in refusal(plain, path)


def test_a_bomb_is_refused_without_being_unpacked(tmp_path):
    count = 2 * ALWAYS // 4
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(count, np.int32))
    path = archive_of(tmp_path / "bomb.npz", {"a": buffer.getvalue()})
    del buffer
    assert path.stat().st_size * 500 < 4 * count
    tracemalloc.start()
    assert "bytes unpacked from" in refusal(plain, path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_only_a_regular_file_is_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.npz")
    for read in (read_trace, read_forecasts):
        assert "got a pipe" in refusal(read, tmp_path / "pipe.npz")
        assert "got a directory" in refusal(read, tmp_path)
        assert "too long" in refusal(read, "x" * 300)


def test_lengths_may_be_of_any_integer_type(tmp_path, excerpt):
    trace = excerpt.take(np.arange(2))
    for dtype in (np.uint64, ">i8", np.uint16):
        lengths = {name: getattr(trace, name).astype(dtype) for name in ("lens", "seq_offsets", "layer_index")}
        lengths |= {"prefill_lens": np.ones(2, dtype), "num_experts": np.array(trace.num_experts, dtype)}
        np.savez(tmp_path / "t.npz", ids=trace.ids, probs_u8=trace.probs_u8, tok=trace.tok, **lengths)
        assert read_trace(tmp_path / "t.npz").without_prompts().steps == trace.steps - 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": np.int64(10**15)}, "at most 262144 experts in all layers"),
        ({"layer_index": np.arange(24) + 10**15}, "expected layers of a model"),
        ({"layer_index": -np.arange(24)}, "expected layers of a model"),
        ({"seq_offsets": np.array([0, 2**63, 16], np.uint64)}, "seq_offsets"),
        ({"model": np.array(["a", "b"])}, "model has shape"),
        ({"model": np.array(3)}, "model has dtype"),
        ({"vocab_size": np.array([1, 2])}, "vocab_size has shape"),
        ({"num_experts": np.array(32.0)}, "num_experts has dtype"),
    ],
    ids=lambda value: str(value)[:16],
)
def test_values_out_of_this_world_are_refused(tmp_path, excerpt, changes, words):
    trace = excerpt.take(np.arange(2))
    fields = {name: getattr(trace, name) for name in ("ids", "probs_u8", "tok", "lens", "seq_offsets", "layer_index")}
    np.savez(tmp_path / "t.npz", **(fields | {"num_experts": np.int32(trace.num_experts)} | changes))
    assert words in refusal(read_trace, tmp_path / "t.npz")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trigger": np.array([1, 2])}, "trigger is int64 of 1 dimensions"),
        ({"trigger": np.array("x")}, "trigger is <U1 of 0 dimensions"),
        ({"name": np.array(3)}, "name is int64"),
        ({"other": np.array(3)}, "unknown array 'other'"),
        ({"next": np.zeros((1, 2, 3), np.float32)}, "next is float32"),
    ],
    ids=lambda value: str(value)[:16],
)
def test_faults_of_forecasts(tmp_path, changes, words):
    np.savez(tmp_path / "f.npz", **({"next": np.zeros((1, 2, 3), np.float16)} | changes))
    assert words in refusal(read_forecasts, tmp_path / "f.npz")


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.5, 2.0])
def test_every_forecast_is_a_probability(tmp_path, excerpt, value):
    trace = excerpt.take(np.arange(1))
    following = np.zeros((trace.steps, trace.layers, trace.num_experts), np.float16)
    following[1] = -0.0
    np.savez(tmp_path / "f.npz", next=following)
    read_forecasts(tmp_path / "f.npz", trace)
    following[trace.steps // 2, 3, 4] = value
    np.savez(tmp_path / "f.npz", next=following)
    assert "outside [0, 1]" in refusal(lambda path: read_forecasts(path, trace), tmp_path / "f.npz")
