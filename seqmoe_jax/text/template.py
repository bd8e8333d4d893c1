"""The Jinja chat templates of model directories: which one counts, and what it is given, both as in transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from seqmoe_jax.errors import ConfigError, PromptError
from seqmoe_jax.inputs import read_json, read_text
from seqmoe_jax.text.messages import Message
from seqmoe_jax.text.tokenizer_files import special_tokens

_DEFAULT, _WITH_TOOLS = "default", "tool_use"


class Template:
    """The templates of one model by name, as a function from a conversation to its prompt.

    `special` are the tokens that they may name, such as `bos_token`; `where` says in errors which file they are from.
    Raises `ConfigError` for what is not Jinja; rendering raises `PromptError`.
    """

    def __init__(self, sources: Mapping[str, str], *, special: Mapping[str, str], where: str):
        self._special, self._where = special, where
        self._compiled = {name: _compile(source, where) for name, source in sources.items()}
        # A role that a template names is one that it knows.
        self._developer = {name: bool(re.search(r"['\"]developer['\"]", text)) for name, text in sources.items()}

    def __call__(self, messages: Sequence[Message], **options: Any) -> str:
        name = _WITH_TOOLS if options.get("tools") is not None and _WITH_TOOLS in self._compiled else _DEFAULT
        if name not in self._compiled:
            raise PromptError(f"{self._where}: none of the chat templates is the default: {', '.join(self._compiled)}")
        if not self._developer[name]:  # OpenAI's newer name for what others call the system message
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        values = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special, **options}
        try:
            return self._compiled[name].render({**values, "messages": messages})
        except Exception as error:  # templates fail in any way: wrong types, missing fields, what they raise themselves
            reason = " ".join(str(error).split())[:200]
            raise PromptError(f"{self._where}: the model's chat template refuses these messages: {reason}") from error


def open_template(directory: Path) -> Template | None:
    """The chat template of a model directory; None where there is none. Raises `ConfigError`."""
    found = read_templates(directory)
    return None if found is None else Template(found[1], special=special_tokens(directory), where=str(found[0]))


def read_templates(directory: Path) -> tuple[Path, dict[str, str]] | None:
    """Where a directory says how to write conversations, and the templates by name.

    Files (`chat_template.jinja`, `additional_chat_templates/*.jinja`) go before the field `chat_template` of
    `tokenizer_config.json` (text, or a list by name), and that before `chat_template.json`, which is a processor's.
    """
    more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    files = {_DEFAULT: directory / "chat_template.jinja"} | {path.name.removesuffix(".jinja"): path for path in more}
    texts = {name: read_text(path, "a chat template") for name, path in files.items() if path.is_file()}
    if texts:
        return files[next(iter(texts))], texts
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = directory / name
        given = read_json(path).get("chat_template") if path.is_file() else None
        if given is not None:
            return path, _by_name(given, path)
    return None


def _by_name(given: object, path: Path) -> dict[str, str]:
    try:
        named = {item["name"]: item["template"] for item in given} if isinstance(given, list) else {_DEFAULT: given}
    except (KeyError, TypeError):
        named = {}
    if not named or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise ConfigError(
            f'{path}: chat_template must be text, or a list of {{"name": ..., "template": ...}}, got '
            f"{str(given)[:60]!r}"
        )
    return named  # type: ignore[return-value]


def _compile(source: str, where: str) -> Any:
    """A Jinja template in the environment that transformers gives it: sandbox, helpers, blocks trimmed."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`: marks what an assistant said, for training; here its inside alone matters."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("inside"), [], [], body).set_lineno(line)

        def inside(self, caller: Any) -> Any:
            return caller()

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
        sort_keys: bool = False,
    ) -> str:  # fmt: skip
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        reason = " ".join(str(error).split())[:150]
        raise ConfigError(f"{where}: expected a Jinja chat template, got {reason}; download it again") from error
