"""The one way in for what comes from outside: regular files of bounded size, text in UTF-8, JSON of bounded depth.

Whatever is wrong is one line. What is in the JSON is then read through `Fields`. Both are ours and not a schema
library's: fields of a configuration have other names in other files and defaults that follow from other fields, which
the families say in one line each and a schema would say again; and a model's files mean what Python's own parser makes
of them (of a key that is given twice the last one holds), since that is what wrote them.
"""

from __future__ import annotations

import json
import os
import stat
from itertools import chain
from typing import Any, NoReturn

from seqmoe_jax.errors import ConfigError, SeqMoEError

Error = type[SeqMoEError]
PathLike = str | os.PathLike[str]
MAX_JSON = 16 << 20  # bytes; its values may take twenty times as much
MAX_INDEX = 4 * MAX_JSON  # of a checkpoint: a name for every tensor of every expert
MAX_DEPTH = 100  # of lists and objects in each other
_KINDS = {stat.S_ISDIR: "a directory", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device",
          stat.S_ISBLK: "a device"}  # fmt: skip


def is_file(path: PathLike) -> bool:
    """Whether there is something to read that is no directory. Unlike `Path.is_file` never an error, and true of pipes
    and the like, so that their readers refuse them by name."""
    return os.path.exists(path) and not os.path.isdir(path)


def check_file(path: PathLike, what: str, error: Error = ConfigError, *, pipes: bool = False) -> None:
    """Raises `error` where `path` is no regular file that can be read: no device, and no pipe, which may block (unless
    `pipes` says that the caller knows how to read them)."""
    try:
        mode = os.stat(path).st_mode
        came = next((name for is_kind, name in _KINDS.items() if is_kind(mode)), None)
        if came == "a pipe" and pipes:
            came = None
        if came is None and not os.access(path, os.R_OK):
            came = "one without permission to read it"
    except FileNotFoundError:
        came = "no such file"
    except (OSError, ValueError) as fault:  # a loop of links, a name too long; a NUL in it
        came = _reason(fault)
    if came is not None:
        raise error(f"{path}: expected {what}, got {came}; check the path") from None


def read_bytes(
    path: PathLike, what: str, *, most: int = MAX_JSON, error: Error = ConfigError, pipes: bool = False
) -> bytes:
    """All bytes of a regular file (with `pipes`, of what a shell writes into one too), of which there may be `most`.

    Raises `error`.
    """
    check_file(path, what, error, pipes=pipes)
    try:
        # Without O_NONBLOCK this would wait until somebody opens a pipe for writing.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            os.set_blocking(file.fileno(), True)
            data = file.read(most + 1)
    except OSError as fault:
        raise error(f"{path}: expected {what}, got {_reason(fault)}; check the file") from None
    if len(data) > most:
        raise error(f"{path}: expected {what} of at most {most} bytes, got more; is this the right file?")
    return data


def read_text(
    path: PathLike, what: str, *, most: int = MAX_JSON, error: Error = ConfigError, pipes: bool = False
) -> str:
    """The text of a file. Raises `error`."""
    return _decode(read_bytes(path, what, most=most, error=error, pipes=pipes), f"{path}: expected {what}", error)


def read_json(path: PathLike, *, most: int = MAX_JSON, error: Error = ConfigError) -> dict[str, Any]:
    """The JSON object in a file. Raises `error`.

    NaN and infinities, which Python writes although JSON has none, are read: `Fields` refuses them where they matter.
    """
    value = parse_json(read_bytes(path, "a JSON file", most=most, error=error), str(path), error=error, strict=False)
    if not isinstance(value, dict):
        raise error(f"{path}: expected a JSON object, got {KINDS[type(value)]}; is this the right file?")
    return value


KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "text", int: "an integer", float: "a number",
                          bool: "true or false", type(None): "null"}  # fmt: skip


def parse_json(data: bytes | str, where: str, *, error: Error = ConfigError, strict: bool = True) -> Any:
    """A JSON value. Raises `error` where it is none, or nested too deep; if `strict`, for NaN and infinities too."""
    expected = f"{where}: expected UTF-8 JSON"
    text = data if isinstance(data, str) else _decode(data, expected, error)
    try:
        value = json.loads(text, parse_constant=_no_number if strict else None)
    except RecursionError:
        raise error(_too_deep(expected)) from None
    except ValueError as fault:  # also of an integer of too many digits
        raise error(f"{expected}, got {_reason(fault)}") from None
    # Level by level: a value that is too deep to be walked recursively is refused before anyone tries.
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        inside = chain.from_iterable(item.values() if isinstance(item, dict) else item for item in level)
        level = [item for item in inside if isinstance(item, (dict, list))]
    if level:
        raise error(_too_deep(expected))
    if "\\ud" in text or "\\uD" in text:  # escapes of surrogates; one alone is no text that could be printed or encoded
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise error(f"{expected}, got half of a surrogate pair, which is no text") from None
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is no JSON number")


def _too_deep(expected: str) -> str:
    return f"{expected} nested at most {MAX_DEPTH} deep, got deeper"


def _decode(data: bytes, expected: str, error: Error) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise error(f"{expected}, got bytes that are not UTF-8 ({fault.reason} at byte {fault.start})") from None
    if text.startswith("\ufeff"):
        raise error(f"{expected}, got a byte order mark before it; save it as UTF-8 without one")
    return text


def _reason(fault: Exception) -> str:
    return (isinstance(fault, OSError) and fault.strerror) or str(fault)
