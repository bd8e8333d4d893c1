"""What becomes of every field of a request.

A field is *applied*; or *accepted*, because nothing that it may say changes an answer; or *refused*, unless its value
asks for nothing. A field that is not in the table is refused, because it may have mattered. null is nothing anywhere.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from seqmoe_jax.serving.kinds import Does, Endpoint, Field, named
from seqmoe_jax.serving.refusal import Refusal
from seqmoe_jax.serving.table import OTHERS, ROWS

PATHS: Mapping[str, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
FIELDS: Mapping[tuple[str, Endpoint], Field] = {(field.name, field.endpoint): field for field in ROWS}


def read_fields(body: Mapping[str, Any], *, chat: bool, within: str = "") -> dict[str, Any]:
    """The applied fields of a body by name, those inside of others with a dot between. Raises `Refusal`, which names a
    field and says what to do."""
    here, elsewhere = _endpoints(chat)
    given: dict[str, Any] = {}
    for name, value in body.items():
        path = within + name
        if value is None:
            continue
        field = FIELDS.get((path, "both")) or FIELDS.get((path, here))
        if field is None:
            raise _foreign(path) if (path, elsewhere) in FIELDS else _unknown(path, chat)
        if (taken := field.value(path, value)) is not None:
            given[path] = taken
    if "stream_options" in given:
        given |= read_fields(given.pop("stream_options"), chat=chat, within="stream_options.")
    return given


def read_rows(body: Mapping[str, Any], rows: Sequence[Field]) -> dict[str, Any]:
    """The applied fields of a body with a table of its own. Raises `Refusal`."""
    fields = {field.name: field for field in rows}
    given: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        if name not in fields:
            raise _unknown_among(rows, name)
        if (taken := fields[name].value(name, value)) is not None:
            given[name] = taken
    return given


def _endpoints(chat: bool) -> tuple[Endpoint, Endpoint]:
    """This endpoint and the other one."""
    return ("chat", "completions") if chat else ("completions", "chat")


def _foreign(path: str) -> Refusal:
    other = next(field.endpoint for field in ROWS if field.name == path)
    return Refusal(f"{path} is a field of {PATHS[other]}; leave it out or ask there", param=path)


def _unknown(path: str, chat: bool) -> Refusal:
    return _unknown_among([field for field in ROWS if field.endpoint in ("both", _endpoints(chat)[0])], path)


def _unknown_among(rows: Sequence[Field], path: str) -> Refusal:
    known = [field.name for field in rows if field.does == "applied"]
    near = difflib.get_close_matches(path[:100], known, n=1, cutoff=0.75)
    advice = f"did you mean {near[0]}?" if near else "leave it out"
    return Refusal(f"unknown field {named(path)}, which might change the answer elsewhere; {advice}", param=named(path))


def as_markdown(rows: Sequence[Field] = ROWS) -> str:
    """A table, for docs/serving.md."""
    return "\n".join(
        [
            *_section(rows, "applied", "field | what it may be | what it does",
                      lambda field: f"{field.kind.words} | {field.says}"),
            *_section(rows, "accepted", "field | why it cannot matter", lambda field: field.says),
            *_section(rows, "refused", "field | accepted if it is | otherwise a 400, because",
                      lambda field: f"{' or '.join(f'`{json.dumps(v)}`' for v in field.neutral)} | {field.says}"),
        ]
    )  # fmt: skip


def _section(rows: Sequence[Field], does: Does, head: str, cells: Callable[[Field], str]) -> Iterator[str]:
    if not any(field.does == does for field in rows):
        return
    yield from (f"### {does.capitalize()}", "", f"| {head} |", "|" + "---|" * (head.count("|") + 1))
    for field in rows:
        if field.does == does:
            where = "" if field.endpoint == "both" else f" ({field.endpoint})"
            yield f"| `{field.name}`{where} | {cells(field)} |"
    yield ""


def docs() -> str:
    """All tables, for docs/serving.md."""
    others = (f"## Fields of `{path}`\n\n{as_markdown(rows)}" for path, rows in OTHERS.items())
    return "\n".join([as_markdown(), *others])


if __name__ == "__main__":
    print(docs())
