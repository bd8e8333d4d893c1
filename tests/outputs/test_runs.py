"""Results of another run or kind are not replaced unasked; parts are of one run, and of one process at a time."""

import os
import subprocess
import sys

import pytest

from seqmoe_jax.errors import OutputError
from seqmoe_jax.outputs.directories import check_directory, writing_directory
from seqmoe_jax.outputs.files import write_text
from seqmoe_jax.outputs.parts import check_parts, parts_of
from seqmoe_jax.outputs.runs import check_replaced, differences, from_json, to_json

RUN = {"seed": 0, "sampling": {"top_k": 3}, "prompts": "a" * 64}


def read(path):
    return from_json(path.read_bytes())


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ("notes", "is there already and is no result: --force replaces it"),
        ("[1]", "is no result"),
        ("{}", "a result of another run \\(it does not say which\\)"),
        (to_json(RUN | {"seed": 1}), "\\(seed 1 there, 0 here\\): --force replaces it, or choose another name"),
        (to_json(RUN | {"sampling": {"top_k": 4}}), "\\(top_k 4 there, 3 here\\)"),
        (to_json(RUN | {"prompts": "b" * 64}), "\\(different prompts\\)"),
        (to_json(RUN | {"more": 1}), "\\(more 1 there, null here\\)"),
    ],
)
def test_what_is_there_is_said_and_stays(tmp_path, there, words):
    (tmp_path / "r").write_text(there)
    with pytest.raises(OutputError, match=words):
        check_replaced(tmp_path / "r", "result", read, RUN, force=False)
    check_replaced(tmp_path / "r", "result", read, RUN, force=True)


@pytest.mark.parametrize("there", ["", to_json(RUN)])
def test_nothing_and_the_same_run_are_replaced(tmp_path, there):
    check_replaced(tmp_path / "r", "result", read, RUN, force=False)
    (tmp_path / "r").write_text(there)
    check_replaced(tmp_path / "r", "result", read, RUN, force=False)
    assert not differences(RUN, RUN)


def killed(out, run, **options):
    """Does a part, and is interrupted."""
    there = []

    def work():
        with parts_of(out, run, force=False, **options) as parts:
            there.extend(path.name for path in parts.glob("*.npz"))
            (parts / "1.npz").write_text("")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    return there


def test_parts_stay_until_the_end(tmp_path):
    assert killed(tmp_path / "T", RUN) == []
    assert killed(tmp_path / "T", RUN) == ["1.npz"]
    assert killed(tmp_path / "T", RUN, restart=True) == []
    with parts_of(tmp_path / "T", RUN, force=False) as parts:
        assert (parts / "1.npz").exists()
    assert list(tmp_path.iterdir()) == []


def test_parts_of_another_run_are_refused_or_removed(tmp_path):
    killed(tmp_path / "T", RUN)
    other = RUN | {"seed": 2}
    with (
        pytest.raises(OutputError, match=r"T.parts has parts of another run \(seed 0 there, 2 here\): --force begins"),
        parts_of(tmp_path / "T", other, force=False),
    ):
        pass
    assert killed(tmp_path / "T", RUN) == ["1.npz"]
    with parts_of(tmp_path / "T", other, force=True) as parts:
        assert not list(parts.glob("*.npz"))


def test_an_interrupt_before_the_first_part_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), parts_of(tmp_path / "T", RUN, force=False):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_parts_are_of_one_process_at_a_time(tmp_path):
    code = """if True:
        import sys
        from pathlib import Path
        from seqmoe_jax.errors import OutputError
        from seqmoe_jax.outputs.parts import parts_of
        try:
            with parts_of(Path(sys.argv[1]), {}, force=True):
                print("has them")
        except OutputError as error:
            print(error)
    """
    command = [sys.executable, "-c", code, str(tmp_path / "T")]
    with parts_of(tmp_path / "T", RUN, force=False) as parts:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "another process is writing it" in said
        assert parts.is_dir()
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "has them\n"


def test_a_file_where_parts_belong_is_said(tmp_path):
    (tmp_path / "T.parts").write_text("")
    with pytest.raises(OutputError, match=r"T.parts is no directory"):
        check_parts(tmp_path / "T")
    with pytest.raises(OutputError, match="File name too long"):
        check_parts(tmp_path / ("x" * 255))


def make(out, beside, text, fault=None):
    beside.mkdir(exist_ok=True)
    with writing_directory(out, beside=beside) as staged:
        write_text(staged / "r.json", text)
        if fault:
            raise fault


def test_a_directory_appears_whole_or_not_at_all(tmp_path):
    out, beside = tmp_path / "d", tmp_path / "beside"
    make(out, beside, "first")
    with pytest.raises(KeyboardInterrupt):
        make(out, beside, "half of the second", KeyboardInterrupt)
    assert (out / "r.json").read_text() == "first"
    make(out, beside, "second")
    assert (out / "r.json").read_text() == "second"
    assert list(beside.iterdir()) == []


def test_a_directory_that_cannot_be_renamed_leaves_the_former(tmp_path, monkeypatch):
    out, beside = tmp_path / "d", tmp_path / "beside"
    make(out, beside, "first")
    rename = os.rename

    def full(source, target):
        if target == out and (source / "r.json").read_text() == "second":
            raise OSError(28, os.strerror(28))
        rename(source, target)

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OutputError, match="d: cannot be written: No space left on device"):
        make(out, beside, "second")
    assert (out / "r.json").read_text() == "first"
    assert list(beside.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("file", "file is no directory"),
        ("others", r"has other files in it \(notes.txt\)"),
        ("no/d", "no directory"),
        ("file/d", "Not a directory"),
        ("x" * 256, "File name too long"),
        (".", "cannot be replaced where it is"),
        ("/proc", "cannot be replaced where it is"),
        ("/dev/null", "is no directory"),
    ],
)
def test_a_directory_that_cannot_be_written_is_found_before(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "notes.txt").write_text("")
    with pytest.raises(OutputError, match=words):
        check_directory(tmp_path / name, mine=("*.json",))
