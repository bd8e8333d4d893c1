"""From a conversation to a prompt: the model's own Jinja template, or the format that its family was trained on.

A conversation is a list of `{"role": ..., "content": ...}`, the last one to be answered. The content is text, or a
list of parts `{"type": "text", "text": ...}` as OpenAI's clients send it. Names of special tokens inside a content
become those tokens, as in transformers: strip them from what is not trusted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqmoe_jax.errors import PromptError
from seqmoe_jax.text import budget, deepseek_v4, harmony
from seqmoe_jax.text.messages import Message, check_messages, with_parsed_arguments
from seqmoe_jax.text.stream import TextStream
from seqmoe_jax.text.template import Template, open_template
from seqmoe_jax.text.tokenizers import Tokenizer
from seqmoe_jax.text.tools import Form

Render = Callable[..., str]  # (messages, **options) -> prompt

_FORMATS: Mapping[str, Render] = {"gpt_oss": harmony.render, "deepseek_v4": deepseek_v4.render}
_THOUGHT_END = "</think>"  # what stands before it in an earlier reply, templates leave out


@dataclass(frozen=True, kw_only=True)
class Chat:
    """How a model is talked to. `channels`: it replies in GPT-OSS's channels, of which only one is the answer;
    `with_calls`: calls of tools are in the text of its replies too. Other models' calls always are."""

    render: Render
    channels: bool = False
    with_calls: bool = False

    @property
    def calls(self) -> Form | None:
        """The form in which this model calls tools; None where nothing says it."""
        return self.render.calls if isinstance(self.render, Template) else None

    @property
    def options(self) -> frozenset[str]:
        """What `render` takes besides the conversation: the variables of a template, the arguments of a format."""
        if isinstance(self.render, Template):
            return self.render.options
        return frozenset([*inspect.signature(self.render).parameters][1:])

    def prompt(self, messages: Sequence[Message], **options: Any) -> str:
        """The prompt of a conversation. `options` are the template's, such as `enable_thinking` (Qwen3).

        Raises `PromptError` for messages or options that the template does not take, and for a message that the
        template leaves out.
        """
        known = self.options
        for name in options:
            if name not in known:
                has = f"; it has {', '.join(sorted(known))}" if known else ""
                raise PromptError(f"this model's chat format has no option {name!r}{has}")
        given: list[Message] = [*check_messages(messages)]
        with budget.rendering(given):
            prompt, shown = self._rendered(given, options)
            _check_all_shown(lambda other: self.render(other, **options), shown, prompt)
            if isinstance(tools := options.get("tools"), Sequence):
                _check_tools_shown(lambda others: self.render(shown, **{**options, "tools": others}), tools)
        return prompt

    def _rendered(self, messages: list[Message], options: Mapping[str, Any]) -> tuple[str, list[Message]]:
        """The prompt, and the messages as the template takes them: most want the arguments of tool calls as objects,
        some as the text that they may be."""
        parsed = with_parsed_arguments(messages)
        try:
            return self.render(parsed, **options), parsed
        except PromptError:
            if parsed == messages:
                raise
            with suppress(PromptError):
                return self.render(messages, **options), messages
            raise

    def reply(self, tokenizer: Tokenizer, stop: tuple[str, ...], context: Sequence[int]) -> TextStream | harmony.Reply:
        """What turns the tokens of a reply into its text as they come. `context` are the prompt's."""
        if self.channels:
            return harmony.Reply(tokenizer=tokenizer, stop=stop, context=context, calls=self.with_calls)
        return TextStream(tokenizer=tokenizer, stop=stop, context=context)


def chat_of(directory: Path, family: str) -> Chat | None:
    """How the model in a directory is talked to: its template, else its family's format, else None.

    Raises `ConfigError` for a template that cannot be read.
    """
    render = open_template(directory, family) or _FORMATS.get(family)
    return None if render is None else Chat(render=render, channels=family == "gpt_oss")


def _check_all_shown(render: Callable[[list[Message]], str], messages: Sequence[Message], prompt: str) -> None:
    """Raises `PromptError` for a message that the prompt does not depend on: a template may leave out what it does not
    know without a word.

    Templates trim texts, escape them, leave out earlier thoughts: whether a text stands there as it came says
    nothing. So each text is replaced by a mark. Where all marks of one rendering come out, nothing is missing; the
    prompt of a conversation of which one text alone is replaced is another one, or that text was left out.
    """
    marked = [_marked(message, index) for index, message in enumerate(messages)]
    try:
        together = render(marked)
    except PromptError:  # not every template takes any text
        together = ""
    for index, message in enumerate(messages):
        if marked[index] == message or all(mark in together for mark in _marks(message, index)):
            continue
        try:
            other = render([*messages[:index], marked[index], *messages[index + 1 :]])
        except PromptError:
            continue
        if other == prompt:
            what = ".tool_calls" if "tool_calls" in message else ""
            raise PromptError(
                f"messages[{index}]{what} (role {message['role']}) does not appear in the prompt: the model's chat "
                "template leaves it out, at least at this place; send it in another role, or leave it out"
            )


def _check_tools_shown(render: Callable[[list[Any]], str], tools: Sequence[Any]) -> None:
    """Raises `PromptError` for a tool that the prompt does not name."""
    marks = [f"mark{index}tool" for index in range(len(tools))]
    marked = [
        {**tool, "function": {**tool["function"], "name": mark}} if _is_function(tool) else tool
        for tool, mark in zip(tools, marks, strict=True)
    ]
    prompt = render(marked)
    for index, mark in enumerate(marks):
        if mark not in prompt and _is_function(tools[index]):
            raise PromptError(
                f"tools[{index}] does not appear in the prompt: the model's chat template leaves it out; describe it "
                "in a message, or leave it out"
            )


def _is_function(tool: object) -> bool:
    return isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping)


def _marks(message: Message, index: int) -> list[str]:
    """What stands for the texts of a message: those of its tool calls where it makes some, else its content."""
    if "tool_calls" in message:
        return [f"mark{index}call{at}" for at in range(len(message["tool_calls"]))]
    text = message["content"] or ""
    if message["role"] == "assistant":
        text = text.rpartition(_THOUGHT_END)[2]
    return [f"mark{index}text"] if text.strip() else []


def _marked(message: Message, index: int) -> Message:
    """The message with its marks in place of its texts."""
    marks = _marks(message, index)
    if "tool_calls" not in message:
        return {**message, "content": marks[0]} if marks else message
    calls = zip(message["tool_calls"], marks, strict=True)
    return {**message, "tool_calls": [{**call, "function": {**call["function"], "name": mark}} for call, mark in calls]}
