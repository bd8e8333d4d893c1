"""What comes from outside is read in one way: whatever it is, a value of the right kind or one line comes of it."""

from __future__ import annotations

import json
import os
import socket

import pytest

from seqmoe_jax.errors import MOST_LINE, CheckpointError, ConfigError, SeqMoEError
from seqmoe_jax.fields import Fields
from seqmoe_jax.inputs import MAX_DEPTH, check_file, parse_json, read_bytes, read_json, read_text


def refusal(call, *args, error=ConfigError, **options):
    with pytest.raises(error) as caught:
        call(*args, **options)
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) <= MOST_LINE
    return line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 200_000, "nested at most 100 deep"),
        ("[" * 200_000 + "]" * 200_000, "nested at most 100 deep"),
        ('{"a":' * 500 + "1" + "}" * 500, "nested at most 100 deep"),
        ("1" * 5000, "digits"),
        ("NaN", "NaN, which is no JSON number"),
        ('{"a": -Infinity}', "-Infinity, which is no JSON number"),
        (r'{"a": "\ud83d"}', "half of a surrogate pair"),
        (r'{"\uDC00": 1}', "half of a surrogate pair"),
        ("{", "expected UTF-8 JSON"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_what_is_no_json_is_refused(text, words):
    assert words in refusal(parse_json, text, "there")


def test_what_python_writes_is_read():
    value = {"text": "\U0001f642 \n", "numbers": [1, 2.5, -3e20, 10**400], "none": None}
    assert parse_json(json.dumps(value), "there") == value
    assert parse_json(r'"\ud83d\ude42"', "there") == "\U0001f642"
    assert parse_json('{"a": 1, "a": 2}', "there") == {"a": 2}
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(parse_json(deepest, "there")) == deepest
    assert "nested" in refusal(parse_json, f"[{deepest}]", "there")


def test_only_a_regular_file_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "socket"))
    server.close()
    for name, words in {
        "none": "no such file", "pipe": "a pipe", "folder": "a directory", "loop": "symbolic links",
        "socket": "a socket", "x" * 300: "too long", "a\0b": "null", "/dev/zero": "a device",
    }.items():  # fmt: skip
        for read in (read_json, lambda path: read_text(path, "text"), lambda path: check_file(path, "a file")):
            assert words in refusal(read, tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}")
    path.chmod(0)
    assert "permission" in refusal(read_json, path)


def test_a_file_has_a_greatest_size(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 11)
    assert read_bytes(path, "a file", most=11) == b"x" * 11
    assert "at most 10 bytes" in refusal(read_bytes, path, "a file", most=10)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "at most 16777216 bytes" in refusal(read_json, path)


def test_the_reader_says_which_error(tmp_path):
    with pytest.raises(CheckpointError):
        read_json(tmp_path / "none", error=CheckpointError)


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    "value",
    [NAN, INFINITY, -INFINITY, 10**400, -(10**5000), "1", True, [1], {"a": 1}],
    ids=lambda value: type(value).__name__,
)
def test_a_number_is_finite_and_within_its_range(value):
    assert "field 'x' must be a number" in refusal(Fields({"x": value}).number, "x")
    assert "field 'x' must be" in refusal(Fields({"x": value}).number, "x", least=0, most=5)
    if not isinstance(value, int) or value is True or abs(value) > 10:
        assert "field 'x' must be an integer" in refusal(Fields({"x": value}).size, "x")


@pytest.mark.parametrize("value", [0, -1, 1e9, 10**12, 10**400, 3.0, None], ids=lambda value: str(value)[:9])
def test_a_size_is_a_positive_integer_of_this_world(value):
    assert "field 'x'" in refusal(Fields({"x": value}).size, "x")


def test_ranges_by_name_hold_wherever_the_field_is():
    fields = Fields({"eps": 2.0, "inner": {"eps": NAN}, "list": [1, 9]}, ranges={"eps": (0, 1), "list": (0, 5)})
    assert "field 'eps' must be a number from 0 to 1, got 2.0" in refusal(fields.number, "eps")
    assert "inner: field 'eps' must be a number from 0 to 1, got nan" in refusal(fields.group("inner").number, "eps")
    assert "integers from 0 to 5, got 9" in refusal(fields.ints, "list")
    assert Fields({"eps": 1}, ranges={"eps": (0, 1)}).number("eps") == 1.0


def test_texts_and_lists_have_a_greatest_length():
    assert "text of 0 to 1024 characters" in refusal(Fields({"x": "a" * 10**6}).text, "x")
    assert "must be text, got ['a']" in refusal(Fields({"x": ["a"]}).text, "x")
    assert "a list of at most 4096 integers" in refusal(Fields({"x": [1] * 10**6}).ints, "x")
    assert "a list of strings" in refusal(Fields({"x": ["a", 1]}).texts, "x")
    assert "a list of integers" in refusal(Fields({"x": [True]}).ints, "x")
    assert "integers from 0" in refusal(Fields({"x": [2**40]}).ints, "x")


def test_a_field_of_another_name_is_named():
    Fields({"a": 1}).only("a", "b")
    assert "unknown field 'c'; known are a, b" in refusal(Fields({"c": 1}).only, "a", "b")


def test_an_error_is_one_line_whatever_was_put_into_it():
    for text in ("a\nb", "a\x1b[31m", "\ud800", "x" * 10**6, "\x00" * 10**6):
        line = str(SeqMoEError(f"{text} tail"))
        assert line.isprintable()
        assert len(line) <= MOST_LINE


def test_lists_of_numbers_are_finite():
    assert Fields({"x": [1, 0.5]}).numbers("x") == (1, 0.5)
    for value in ([NAN], ["a"], [True], [10**400], 1.0, [1] * 10**5):
        assert "field 'x' must be" in refusal(Fields({"x": value}).numbers, "x")


def test_a_pipe_is_read_where_a_shell_may_give_one(tmp_path):
    read, write = os.pipe()
    os.write(write, b"a prompt")
    os.close(write)
    assert read_text(f"/dev/fd/{read}", "prompts", pipes=True) == "a prompt"
    os.close(read)
    os.mkfifo(tmp_path / "pipe")
    assert read_text(tmp_path / "pipe", "prompts", pipes=True) == ""  # nobody writes to it: it must not be waited for
