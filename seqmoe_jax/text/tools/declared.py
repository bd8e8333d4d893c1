"""Tools as OpenAI's clients declare them, checked: templates are given what is known to be right."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from seqmoe_jax.errors import PromptError
from seqmoe_jax.fields import shown

MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

Tools = Mapping[str, Mapping[str, Any]]  # the JSON schema of each tool's arguments, by the tool's name


def check_tools(tools: Sequence[Any]) -> Tools:
    """The tools of a request by name. Raises `PromptError`, which names the field."""
    if len(tools) > MOST_TOOLS:
        raise PromptError(f"tools must be a list of at most {MOST_TOOLS}, got {len(tools)}")
    known: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            raise PromptError(
                f'{where} must be {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}, got '
                f"{shown(tool)}; there are no other tools"
            )
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PromptError(
                f"{where}.function.name must be 1 to 64 letters, digits, dots, dashes and underscores, got "
                f"{shown(name)}"
            )
        if name in known:
            raise PromptError(f"{where}.function.name {name} is another tool's; give each a name of its own")
        if not isinstance(function.get("description"), (str, type(None))):
            raise PromptError(f"{where}.function.description must be text, got {shown(function['description'])}")
        if not isinstance(schema, (Mapping, type(None))):
            raise PromptError(f"{where}.function.parameters must be a JSON schema, got {shown(schema)}")
        if function.get("strict") not in (None, False):
            raise PromptError(
                f"{where}.function.strict is not supported, got {shown(function['strict'])}: arguments are not held to "
                "the schema; leave it out or send false"
            )
        known[name] = schema or {}
    return known
