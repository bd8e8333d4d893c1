"""The Jinja chat templates of model directories: which one counts, and what it is given, both as in transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seqmoe_jax.errors import ConfigError, PromptError
from seqmoe_jax.inputs import read_json, read_text
from seqmoe_jax.text.messages import Message
from seqmoe_jax.text.side_tokens import names_of, read_side_tokens
from seqmoe_jax.text.tokenizer_kinds import kind_of
from seqmoe_jax.text.tools import form_of

MOST_SOURCE = 1 << 18  # characters; the longest published ones have some ten thousand
_DEFAULT, _WITH_TOOLS = "default", "tool_use"


class Template:
    """The templates of one model by name, as a function from a conversation to its prompt.

    `special` are the tokens that they may name, such as `bos_token`; `where` says in errors which file they are from.
    `calls` is the form in which they show calls of tools, None where they show none that is known.
    Raises `ConfigError` for what is not Jinja; rendering raises `PromptError`.
    """

    def __init__(self, sources: Mapping[str, str], *, special: Mapping[str, str], where: str):
        self._special, self._where = special, where
        self._compiled = {name: _compiled(source, where) for name, source in sources.items()}
        self.options = _options(sources)
        self.calls = form_of("\n".join(sources.values()))
        # A role that a template names is one that it knows.
        self._developer = {name: bool(re.search(r"['\"]developer['\"]", text)) for name, text in sources.items()}

    def __call__(self, messages: Sequence[Message], **options: Any) -> str:
        name = _WITH_TOOLS if options.get("tools") is not None and _WITH_TOOLS in self._compiled else _DEFAULT
        if name not in self._compiled:
            raise PromptError(f"{self._where}: none of the chat templates is the default: {', '.join(self._compiled)}")
        if not self._developer[name]:  # OpenAI's newer name for what others call the system message
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        values = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special, **options}
        from seqmoe_jax.text.budget import Exhausted
        from seqmoe_jax.text.jinja import render

        try:
            return render(self._compiled[name], {**values, "messages": messages})
        except Exhausted as error:
            raise PromptError(f"{self._where}: the model's chat template was stopped: {error}") from None
        except Exception as error:  # templates fail in any way: wrong types, missing fields, what they raise themselves
            reason = _reason(error)
            raise PromptError(f"{self._where}: the model's chat template refuses these messages: {reason}") from error


def open_template(directory: Path, family: str = "") -> Template | None:
    """The chat template of a model directory; None where there is none. Raises `ConfigError`."""
    found = read_templates(directory)
    if found is None:
        return None
    path, sources = found
    kind = kind_of(directory, family)
    tokens = read_side_tokens(directory, defaults=kind.defaults if kind else {})
    return Template(sources, special=names_of(tokens), where=str(path))


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


def _options(sources: Mapping[str, str]) -> frozenset[str]:
    from seqmoe_jax.text.jinja import variables

    return frozenset().union(*map(variables, sources.values())) - {"messages"}


def _compiled(source: str, where: str) -> Any:
    from seqmoe_jax.text.jinja import BoundedEnvironment  # takes a while to import

    if len(source) > MOST_SOURCE:
        raise ConfigError(f"{where}: expected a chat template of at most {MOST_SOURCE} characters, got {len(source)}")
    try:
        return BoundedEnvironment().from_string(source)
    except Exception as error:  # also RecursionError, and the SyntaxError of blocks nested too deep for Python
        raise ConfigError(
            f"{where}: expected a Jinja chat template, got {_reason(error)}; download it again"
        ) from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:150] or type(error).__name__
