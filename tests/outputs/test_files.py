"""Files appear whole, over nothing but files; what would fail after the work is found before it."""

import errno
import os
import resource
import signal
import socket
import subprocess
import sys

import pytest

from seqmoe_jax.errors import OutputError
from seqmoe_jax.outputs import files
from seqmoe_jax.outputs.files import check_file, write_text, writing


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "r.json"
    write_text(out, "first")

    def break_off(fault):
        with writing(out) as file:
            file.write(b"half of the sec")
            file.flush()
            assert out.read_text() == "first"
            raise fault

    for fault in (ValueError, KeyboardInterrupt):
        with pytest.raises(fault):
            break_off(fault)
    assert (out.read_text(), names(tmp_path)) == ("first", ["r.json"])
    write_text(out, "second")
    assert (out.read_text(), names(tmp_path)) == ("second", ["r.json"])


def test_two_writers_at_once_do_not_mix(tmp_path):
    out = tmp_path / "r.json"
    with writing(out) as one, writing(out) as other:
        one.write(b"one" * 9000)
        other.write(b"another")
    assert out.read_bytes() in (b"one" * 9000, b"another")
    assert names(tmp_path) == ["r.json"]


def test_permissions_follow_the_umask_and_a_replaced_file_leaves_its_own(tmp_path):
    out, before = tmp_path / "r.json", os.umask(0o027)
    try:
        write_text(out, "")
        assert out.stat().st_mode & 0o777 == 0o640
        out.chmod(0o604)
        write_text(out, "again")
    finally:
        os.umask(before)
    assert out.stat().st_mode & 0o777 == 0o604


def test_links_are_followed_and_what_they_lead_to_is_replaced(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "r.json").write_text("old")
    (tmp_path / "link").symlink_to("far/r.json")
    (tmp_path / "dangling").symlink_to("far/new.json")
    for name in ("link", "dangling"):
        check_file(tmp_path / name)
        write_text(tmp_path / name, name)
    assert (tmp_path / "link").is_symlink()
    assert [(tmp_path / "far" / name).read_text() for name in ("r.json", "new.json")] == ["link", "dangling"]
    assert names(tmp_path) == ["dangling", "far", "link"]


def loop(path):
    path.symlink_to(path.name)


def listening(path):
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))


NO_FILES = {
    "a directory": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a socket": listening,
    "symbolic links": loop,
    "(no|such file or) directory": lambda path: path.symlink_to("nowhere/r.json"),
    "a device": lambda path: path.symlink_to("/dev/null"),
}


@pytest.mark.parametrize("words", NO_FILES)
def test_only_files_are_replaced(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    NO_FILES[words](tmp_path / "r.json")
    before = os.lstat("r.json")
    for write in (check_file, lambda path: write_text(path, "")):
        with pytest.raises(OutputError, match=f"r.json.*{words}"):
            write("r.json")
    assert os.path.samestat(os.lstat("r.json"), before)
    assert names(tmp_path) == ["r.json"]


def test_what_became_a_device_during_the_work_stays_one(tmp_path):
    out = tmp_path / "r.json"
    with pytest.raises(OutputError, match="is a pipe"), writing(out):
        os.mkfifo(out)
    assert out.is_fifo()
    assert names(tmp_path) == ["r.json"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "expected the name of a file to write"),
        ("new/", "expected the name of a file to write"),
        ("no/r.json", "no directory .*/no"),
        ("file/r.json", "Not a directory"),
        ("x" * 256, "File name too long"),
        ("a\0b", "null"),
        ("/dev/null", "is a device"),
        ("/dev/stdout", "is a|cannot be replaced"),
        ("/proc/r.json", "nothing can be written into /proc"),
    ],
)
def test_what_cannot_be_written_is_found_before(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=words):
        check_file(name)
    assert names(tmp_path) == ["file"]


def test_the_longest_name_can_be_written(tmp_path):
    write_text(tmp_path / ("x" * 255), "")
    assert names(tmp_path) == ["x" * 255]


def test_room_is_looked_for_before(tmp_path):
    check_file(tmp_path / "r.json", needed=1000)
    with pytest.raises(OutputError, match=r"needs about 1000000000000 MB, but .* MB free; make room"):
        check_file(tmp_path / "r.json", needed=10**18)
    assert names(tmp_path) == []


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_is_full_is_one_line_and_leaves_what_was_there(tmp_path, monkeypatch, call):
    out = tmp_path / "r.json"
    write_text(out, "first")
    monkeypatch.setattr(files.os, call, full)
    with pytest.raises(OutputError, match=r"r.json: cannot be written: No space left on device; make room"):
        write_text(out, "second")
    monkeypatch.undo()
    assert (out.read_text(), names(tmp_path)) == ("first", ["r.json"])


def test_a_write_that_finds_no_room_is_one_line(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        check_file(tmp_path / "r.json")
        with pytest.raises(OutputError, match=r"r.json: cannot be written: File too large"):
            write_text(tmp_path / "r.json", "x" * 200_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_permissions_are_looked_at_before(tmp_path):
    """As a user who is not root, whom everything is allowed."""
    code = """if True:
        import os, sys
        from seqmoe_jax.errors import OutputError
        from seqmoe_jax.outputs.files import check_file
        os.setgid(65534), os.setuid(65534)
        for name in sys.argv[1:]:
            try:
                check_file(name)
            except OutputError as error:
                print(error)
    """
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    (tmp_path / "mine.json").write_text("")
    tmp_path.chmod(0o755)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "protected.json").write_text("")
    (tmp_path / "open" / "protected.json").chmod(0o444)
    given = [str(tmp_path / name) for name in ("new.json", "mine.json", "open/protected.json", "open/new.json")]
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == given[:3], done
    assert "Permission denied" in lines[0]
    assert all("write-protected" in line for line in lines[1:])
