"""The reader agrees with the `safetensors` package on good files and says one line about bad ones."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize, serialize
from safetensors.numpy import save_file

from seqmoe_jax.checkpoints.header import DTYPES
from seqmoe_jax.checkpoints.safetensors import INDEX, SINGLE, Checkpoint, open_checkpoint
from seqmoe_jax.errors import CheckpointError

WRITABLE = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
}
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TENSORS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(WRITABLE)), SHAPES, st.integers(0, 255)),
    max_size=6,
)


def spec(dtype: str, shape: tuple[int, ...], content: np.ndarray) -> Any:
    """What `safetensors.serialize` takes: a map up to 0.7, since then a class around a pointer."""
    kind = getattr(safetensors, "TensorSpec", None)
    if kind is None:
        return {"dtype": dtype, "shape": list(shape), "data": content.tobytes()}
    return kind(dtype=dtype, shape=list(shape), data_ptr=content.ctypes.data, data_len=content.nbytes)


def raw_file(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def two_tensors() -> tuple[dict[str, Any], bytes]:
    header = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }
    return header, bytes(range(32))


def write(directory: Path, content: bytes, name: str = SINGLE) -> Path:
    (directory / name).write_bytes(content)
    return directory


def read_tensor(checkpoint: Checkpoint, name: str) -> np.ndarray:
    info = checkpoint.info(name)
    out = np.empty(info.shape, info.dtype)
    checkpoint.read_into(name, out)
    return out


def complains(directory: Path, *words: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert word in line
    return line


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("safetensors")


@given(tensors=TENSORS)
@settings(max_examples=60, deadline=None)
def test_agrees_with_the_safetensors_package_on_every_dtype(scratch: Path, tensors: dict[str, Any]):
    specs, alive = {}, []
    for name, (code, shape, fill) in tensors.items():
        nbytes = int(np.prod(shape)) * DTYPES[code].itemsize
        content = np.arange(fill, fill + nbytes).astype(np.uint8)
        alive.append(content)
        specs[name] = spec(WRITABLE[code], shape, content)
    blob = bytes(serialize(specs, {"format": "np"}))
    theirs = dict(deserialize(blob))
    with open_checkpoint(write(scratch, blob)) as checkpoint:
        assert checkpoint.names == theirs.keys()
        for name, entry in theirs.items():
            info, ours = checkpoint.info(name), read_tensor(checkpoint, name)
            assert DTYPES[entry["dtype"]] == info.dtype == ours.dtype
            assert tuple(entry["shape"]) == info.shape == ours.shape
            assert ours.tobytes() == bytes(entry["data"])
            assert blob[info.offset : info.offset + info.nbytes] == ours.tobytes()


def test_reads_what_the_numpy_api_saved(tmp_path: Path):
    rng = np.random.default_rng(0)
    arrays = {str(dtype): rng.standard_normal((3, 5)).astype(dtype) for dtype in ("f2", "f4", "f8", "i1", "u4")}
    save_file(arrays, tmp_path / SINGLE)
    with open_checkpoint(tmp_path) as checkpoint:
        for name, array in arrays.items():
            np.testing.assert_array_equal(read_tensor(checkpoint, name), array)


def check_all(directory: Path, blob: bytes) -> None:
    """Opens and reads: either a `CheckpointError` of one line, or tensors that are slices of the file."""
    try:
        with open_checkpoint(directory) as checkpoint:
            for name in checkpoint.names:
                info = checkpoint.info(name)
                assert read_tensor(checkpoint, name).tobytes() == blob[info.offset : info.offset + info.nbytes]
            assert sum(checkpoint.info(name).nbytes for name in checkpoint.names) <= len(blob)
    except CheckpointError as error:
        line = str(error)
    else:
        line = "fine"
    assert "\n" not in line
    assert len(line) < 600


@given(edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=250, deadline=None)
def test_changed_bytes_never_give_anything_but_an_error_or_a_right_answer(
    scratch: Path, edits: list[tuple[float, int]]
):
    header, data = two_tensors()
    blob = bytearray(raw_file(header, data))
    for where, value in edits:
        blob[int(where * (len(blob) - len(data)))] = value
    check_all(write(scratch, bytes(blob)), bytes(blob))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    name=st.sampled_from(["a", "b", "__metadata__"]),
    field=st.sampled_from(["dtype", "shape", "data_offsets", None, "more"]),
    value=JSON,
)
@settings(max_examples=200, deadline=None)
def test_any_json_in_any_place_is_refused_or_right(scratch: Path, name: str, field: str | None, value: object):
    header, data = two_tensors()
    if field is None:
        header[name] = value
    else:
        header.setdefault(name, {})[field] = value
    blob = raw_file(header, data)
    check_all(write(scratch, blob), blob)


def test_truncation_anywhere_is_an_error(tmp_path: Path):
    blob = raw_file(*two_tensors())
    for length in range(len(blob)):
        complains(write(tmp_path, blob[:length]), str(tmp_path / SINGLE), "download it again")
    complains(write(tmp_path, blob + b"\0"), "download it again")


@pytest.mark.parametrize(
    "offsets",
    [
        ([0, 24], [20, 28]),
        ([0, 24], [0, 8]),
        ([0, 24], [32, 40]),
        ([8, 32], [32, 40]),
        ([0, 24], [24, 33]),
        ([24, 0], [24, 32]),
        ([-24, 0], [24, 32]),
        ([0, 24], [2**62, 2**62 + 8]),
        ([0, 24, 24], [24, 32]),
        ([0, 24.0], [24, 32]),
    ],
)
def test_lying_offsets(tmp_path: Path, offsets: tuple[list[int], list[int]]):
    header, data = two_tensors()
    header["a"]["data_offsets"], header["b"]["data_offsets"] = offsets
    complains(write(tmp_path, raw_file(header, data)), str(tmp_path / SINGLE), "download it again")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        (2**63).to_bytes(8, "little") + b"{}",
        (100).to_bytes(8, "little") + b"{}",
        raw_file(b"[]", b""),
        raw_file(b'{"\xff": 1}', b""),
        raw_file(b'{"a": {}', b""),
        raw_file(b'{"a":' + b"[" * 100_000, b""),
        raw_file(b'{"a":' + b"9" * 5000 + b"}", b""),
        raw_file(b'{"\\ud800": 1}', b""),
        raw_file(b'{"x": {}, "x": {}}', b""),
        raw_file({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}, b""),
        raw_file({"x": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, b"1234"),
        raw_file({"x": {"dtype": "U8", "shape": [2**62, 0, 9], "data_offsets": [0, 1]}}, b"1"),
        raw_file({"x\ny": {"dtype": ["F32"]}}, b""),
    ],
)
def test_damaged_headers(tmp_path: Path, content: bytes):
    complains(write(tmp_path, content), str(tmp_path / SINGLE), "download it again")


def test_a_dtype_that_numpy_cannot_hold_is_named(tmp_path: Path):
    content = raw_file({"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"1")
    complains(write(tmp_path, content), str(tmp_path / SINGLE), "F4")


def test_a_file_cut_after_it_was_opened(tmp_path: Path):
    blob = raw_file(*two_tensors())
    checkpoint = open_checkpoint(write(tmp_path, blob))
    os.truncate(tmp_path / SINGLE, len(blob) - 1)
    assert read_tensor(checkpoint, "a").shape == (2, 3)
    with pytest.raises(CheckpointError, match=r"expected data up to byte \d+, got its end at byte"):
        read_tensor(checkpoint, "b")


def test_read_into_a_range(tmp_path: Path):
    blob = raw_file(*two_tensors())
    checkpoint = open_checkpoint(write(tmp_path, blob))
    out = np.zeros(4, np.float32)
    checkpoint.read_into("a", out, 8)
    assert out.tobytes() == bytes(range(8, 24))
    buffer = bytearray(10)
    checkpoint.read_into("a", memoryview(buffer)[2:5], 1)
    assert buffer == b"\0\0\1\2\3" + bytes(5)
    checkpoint.read_into("a", np.zeros((0, 3)), 24)
    for bad, offset in ((np.zeros(7, np.float32), 0), (out, 9), (out, -1), (np.zeros((4, 2))[:, 0], 0)):
        with pytest.raises(ValueError, match="cannot read"):
            checkpoint.read_into("a", bad, offset)
    with pytest.raises(CheckpointError, match="expected a tensor 'c', got none"):
        checkpoint.info("c")
    checkpoint.close()
    with pytest.raises(CheckpointError, match="closed"):
        read_tensor(checkpoint, "a")


def shards(directory: Path, weight_map: object, **more: object) -> Path:
    for name in "ab":
        save_file({name: np.full(3, ord(name), np.uint8)}, directory / f"{name}.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map, **more}))
    return directory


def test_shards(tmp_path: Path):
    with open_checkpoint(shards(tmp_path, {"a": "a.safetensors", "b": "b.safetensors"})) as checkpoint:
        assert checkpoint.names == {"a", "b"}
        assert read_tensor(checkpoint, "b").tolist() == [98] * 3


def test_shards_may_be_links_as_in_the_hugging_face_cache(tmp_path: Path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    shards(tmp_path / "blobs", {"a": "a.safetensors", "b": "b.safetensors"})
    for name in ("a.safetensors", "b.safetensors", INDEX):
        (tmp_path / "snapshot" / name).symlink_to(f"../blobs/{name}")
    with open_checkpoint(tmp_path / "snapshot") as checkpoint:
        assert read_tensor(checkpoint, "a").tolist() == [97] * 3


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "a.safetensors", "b": "c.safetensors"}, "a shard 'c.safetensors' beside it, got no such file"),
        ({"a": "a.safetensors", "b": "a.safetensors"}, "1 that are not in theirs ('b')"),
        ({"a": "../a.safetensors"}, "do not trust"),
        ({"a": "/etc/passwd"}, "do not trust"),
        ({"a": ".."}, "do not trust"),
        ({"a": "."}, "do not trust"),
        ({"a": ""}, "do not trust"),
        ({"a": "x/../../a.safetensors"}, "do not trust"),
        ({"a": "..\\a.safetensors"}, "do not trust"),
        ({"a": "a\0"}, "do not trust"),
        ({"a": 3}, "do not trust"),
        ({}, "weight_map"),
        ([], "weight_map"),
        (None, "weight_map"),
    ],
)
def test_bad_indexes(tmp_path: Path, weight_map: object, words: str):
    complains(shards(tmp_path, weight_map), INDEX, words)


def test_bad_directories(tmp_path: Path):
    complains(tmp_path / "none", "no such directory")
    complains(tmp_path, "neither")
    (tmp_path / INDEX).write_bytes(b"\xff{")
    complains(tmp_path, "UTF-8 JSON")


def test_files_are_closed(tmp_path: Path):
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    blob = raw_file(*two_tensors())
    before = open_files()
    checkpoint = open_checkpoint(write(tmp_path, blob))
    assert open_files() == before + 1
    del checkpoint
    assert open_files() == before
    complains(write(tmp_path, blob[:-1]))
    assert open_files() == before


def test_bfloat16_values(tmp_path: Path):
    values = np.array([1.5, -2.0, 0.1], ml_dtypes.bfloat16)
    header = {"x": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}}
    checkpoint = open_checkpoint(write(tmp_path, raw_file(header, values.tobytes())))
    assert re.fullmatch("bfloat16", checkpoint.info("x").dtype.name)
    assert read_tensor(checkpoint, "x").tolist() == values.tolist()
