"""DeepSeek-V4's prompts. Its repository has no Jinja template; the reference is its `encoding/encoding_dsv4.py`.

There is no white space around the role tokens. The beginning of a reply says whether the model is to think: `<think>`,
or `</think>` at once. Tools are not rendered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from seqmoe_jax.errors import PromptError

BOS, EOS, USER, ASSISTANT = (  # between full-width bars, with lower one-eighth blocks for spaces
    f"<\uff5c{name}\uff5c>"
    for name in ("begin\u2581of\u2581sentence", "end\u2581of\u2581sentence", "User", "Assistant")
)
THINK, NO_THINK = "<think>", "</think>"


def render(messages: Sequence[Mapping[str, Any]], *, enable_thinking: bool = False) -> str:
    """The prompt of a conversation of system, user and assistant messages, ending where the reply begins.

    Consecutive user messages become one, with an empty line between them. Earlier replies are kept without their
    reasoning. Raises `PromptError`.
    """
    parts = [BOS]
    for role, group in groupby(messages, key=lambda message: message["role"]):
        contents = []
        for message in group:
            if role not in ("system", "user", "assistant") or message.get("tool_calls"):
                raise PromptError(f"a message of role {role!r} with tools is not supported for deepseek_v4")
            contents.append(message["content"])
        if role == "system":
            parts += contents
        elif role == "user":
            parts += [USER, "\n\n".join(contents), ASSISTANT, NO_THINK]
        else:
            parts += [content + EOS for content in contents]
    if parts[-1] != NO_THINK:
        raise PromptError("the last message must be the user's: deepseek_v4 replies to nothing else")
    return "".join(parts[:-1]) + (THINK if enable_thinking else NO_THINK)
