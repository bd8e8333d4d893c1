"""From a conversation to a prompt: the model's own Jinja template, or the format that its family was trained on.

A conversation is a list of `{"role": ..., "content": ...}`, the last one to be answered. The content is text, or a
list of parts `{"type": "text", "text": ...}` as OpenAI's clients send it. Names of special tokens inside a content
become those tokens, as in transformers: strip them from what is not trusted.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from seqmoe_jax.checkpoints.resolve import read_json
from seqmoe_jax.errors import ConfigError, PromptError
from seqmoe_jax.text import deepseek_v4, harmony
from seqmoe_jax.text.stream import TextStream
from seqmoe_jax.text.tokenizer_files import special_token
from seqmoe_jax.text.tokenizers import Tokenizer

Message = Mapping[str, Any]
Render = Callable[..., str]  # (messages, **options) -> prompt

_FORMATS: Mapping[str, Render] = {"gpt_oss": harmony.render, "deepseek_v4": deepseek_v4.render}


@dataclass(frozen=True, kw_only=True)
class Chat:
    """How a model is talked to. `channels`: it replies in GPT-OSS's channels, of which only one is the answer."""

    render: Render
    channels: bool = False

    def prompt(self, messages: Sequence[Message], **options: Any) -> str:
        """The prompt of a conversation. `options` are the template's, such as `enable_thinking` (Qwen3).

        Raises `PromptError` for messages or options that the template does not take.
        """
        taken = inspect.signature(self.render).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
            for name in options.keys() - taken.keys():
                raise PromptError(
                    f"this model's chat format has no option {name!r}; it has {', '.join(list(taken)[1:])}"
                )
        return self.render(check_messages(messages), **options)

    def reply(self, tokenizer: Tokenizer, stop: tuple[str, ...], context: Sequence[int]) -> TextStream | harmony.Reply:
        """What turns the tokens of a reply into its text as they come."""
        if self.channels:
            return harmony.Reply(tokenizer=tokenizer, stop=stop)
        return TextStream(tokenizer=tokenizer, stop=stop, context=context)


def chat_of(directory: Path, family: str) -> Chat | None:
    """How the model in a directory is talked to: its template, else its family's format, else None.

    Raises `ConfigError` for a template that cannot be read.
    """
    found = read_template(directory)
    render = _FORMATS.get(family)
    if found is not None:
        path, template = found
        config = directory / "tokenizer_config.json"
        render = jinja_render(template, special=read_json(config) if config.is_file() else {}, where=str(path))
    return None if render is None else Chat(render=render, channels=family == "gpt_oss")


def read_template(directory: Path) -> tuple[Path, str] | None:
    """The text of `chat_template.jinja`, else of the field `chat_template` of a JSON file; None where neither is."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path, path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: expected a template in UTF-8, got {error}; download it again") from error
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = directory / name
        template = read_json(path).get("chat_template") if path.is_file() else None
        if isinstance(template, list):  # several by name, as older files have it
            template = next((item["template"] for item in template if item.get("name") == "default"), None)
        if template is not None:
            if not isinstance(template, str):
                raise ConfigError(f"{path}: chat_template must be text, got {type(template).__name__}")
            return path, template
    return None


def check_messages(messages: object) -> list[dict[str, Any]]:
    """A conversation whose contents are plain text. Raises `PromptError`."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise PromptError('messages must be a list such as [{"role": "user", "content": "Hello"}]')
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptError(f'message {index} must be an object with a "role", got {str(message)[:60]!r}')
        checked.append({**message, "content": _text_of(message.get("content"), index)})
    return checked


def _text_of(content: object, index: int) -> str:
    if content is None:  # of an assistant that only called tools
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
                 for part in content]  # fmt: skip
        if all(isinstance(part, str) for part in parts):
            return "".join(parts)  # type: ignore[arg-type]
    raise PromptError(f"the content of message {index} must be text: images, audio and files are not supported")


def jinja_render(template: str, *, special: Mapping[str, Any], where: str) -> Render:
    """A Jinja chat template with what transformers gives it: sandbox, helpers, `bos_token` and the like.

    Raises `ConfigError` for a template that is not Jinja; rendering raises `PromptError`.
    """
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`: marks what an assistant said, for training; here its inside alone matters."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        compiled = environment.from_string(template)
    except jinja2.TemplateError as error:
        reason = " ".join(str(error).split())[:150]
        raise ConfigError(f"{where}: expected a Jinja chat template, got {reason}; download it again") from error
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
    tokens = {name: token for name in names if (token := special_token(special, name)) is not None}
    return partial(_render_jinja, compiled, tokens, where)


def _render_jinja(
    compiled: Any, tokens: Mapping[str, str], where: str, messages: Sequence[Message], **options: Any
) -> str:
    values = {"tools": None, "documents": None, "add_generation_prompt": True, **tokens, **options}
    try:
        return compiled.render(messages=messages, **values)
    except Exception as error:  # templates fail in any way: a wrong type, a missing field, their own raise_exception
        reason = " ".join(str(error).split())[:200]
        raise PromptError(f"{where}: the model's chat template refuses these messages: {reason}") from error
