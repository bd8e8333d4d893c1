"""Whether prompts fit into the context: too long ones are refused before they are tokenized, which takes long."""

from __future__ import annotations

from typing import Any

from seqmoe_jax.api import Engine
from seqmoe_jax.serving.limits import CHARACTERS_PER_TOKEN
from seqmoe_jax.serving.refusal import Refusal

_PIECE = 1 << 14  # characters that are tokenized at once to see whether a text is too long


def too_long(path: str, length: str, engine: Engine, name: str | None = None, advice: str = "shorten it") -> Refusal:
    """A prompt that does not fit into the context: `path` has a certain `length`."""
    context, most = engine.token_engine.context, engine.token_engine.model.spec.context
    larger = f", or serve with a --context of up to {most}" if context < most else ""
    return Refusal(
        f"{path} has {length}, but the context is {context} tokens; {advice}{larger}",
        param=name or path, code="context_length_exceeded",
    )  # fmt: skip


def check_text_length(path: str, text: str, engine: Engine) -> None:
    """Raises `Refusal` for a text that is certainly longer than the context, without tokenizing more than that."""
    context = engine.token_engine.context
    if len(text) > CHARACTERS_PER_TOKEN * context:
        raise too_long(path, f"{len(text):,} characters", engine)
    if len(text) <= _PIECE:
        return
    # A cut adds a few tokens, where it falls into one: twice the context leaves room for them.
    count = 0
    for at in range(0, len(text), _PIECE):
        count += len(engine.tokenizer.encode(text[at : at + _PIECE], add_special_tokens=False))
        if count > 2 * context:
            raise too_long(path, f"more than {context} tokens in its first {at + _PIECE:,} characters", engine)


def check_messages_length(messages: list[Any], options: dict[str, Any], engine: Engine) -> None:
    """The same for a conversation, of which every message takes a token at least, and for options of its template."""
    context = engine.token_engine.context
    if len(messages) > context:
        raise too_long("messages", f"{len(messages):,} messages", engine)
    texts, total, rest = [], 0, [messages, options]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, dict):
            rest += value.values()
            total += sum(map(len, value))
        elif isinstance(value, list):
            rest += value
        total += len(value) if isinstance(value, str) else 1
        if total > CHARACTERS_PER_TOKEN * context:
            raise too_long("messages", "too many characters", engine)
    check_text_length("messages", "".join(texts), engine)


def new_tokens(path: str, tokens: list[int], most: int | None, engine: Engine, *, name: str, usual: int | None) -> int:
    """How many new tokens a prompt may get: `most` if it was asked for under this `name`, else `usual`, or what the
    context leaves."""
    left = engine.token_engine.context - len(tokens)
    if left < 1:
        raise too_long(path, f"{len(tokens):,} tokens", engine, advice="shorten it, so that a new one has room")
    if most is None:
        return left if usual is None else min(left, usual)
    if most > left:
        raise too_long(
            path, f"{len(tokens):,} tokens and {name} is {most:,}", engine, name,
            f"shorten it, or lower {name} to {left}",
        )  # fmt: skip
    return most
