"""Between text and token ids: tokenizers, end tokens, incremental decoding, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from seqmoe_jax.checkpoints.resolve import read_json
from seqmoe_jax.errors import CheckpointError, ConfigError, PromptError

_INCOMPLETE = "\ufffd"  # what decoding shows for the first bytes of a character whose rest is still to come


@runtime_checkable
class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...


class FileTokenizer:
    """A `tokenizer.json`. Raises `CheckpointError` where it is missing or damaged."""

    def __init__(self, directory: Path):
        import tokenizers  # takes a while to import; not needed for token ids

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{path}: expected the model's tokenizer, got no such file; copy it there from the model's page"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            reason = " ".join(str(error).split())[:100]
            raise CheckpointError(f"{path}: expected a tokenizer, got {reason}; download the file again") from error

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


@dataclass(frozen=True, kw_only=True)
class ByteTokenizer:
    """UTF-8 bytes as ids, for models with random weights, which have no tokenizer."""

    vocab: int

    def encode(self, text: str) -> list[int]:
        return [byte % self.vocab for byte in text.encode("utf-8")]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token % 256 for token in tokens).decode("utf-8", errors="replace")


def end_tokens(directory: Path) -> tuple[int, ...]:
    """`eos_token_id` of `generation_config.json`, else `config.json`: an id, a list, or none. Raises `ConfigError`."""
    for name in ("generation_config.json", "config.json"):
        if not (directory / name).is_file():
            continue
        value = read_json(directory / name).get("eos_token_id")
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
            raise ConfigError(f"{directory / name}: eos_token_id must be an integer or a list of them, got {value!r}")
        return tuple(values)
    return ()


def encode_prompt(tokenizer: Tokenizer, prompt: object, index: int = 0) -> list[int]:
    """Token ids of a prompt. Raises `PromptError` for what is empty or not text."""
    if not isinstance(prompt, str):
        raise PromptError(f"prompt {index} must be a string, got {type(prompt).__name__}")
    tokens = tokenizer.encode(prompt)
    if not tokens:
        raise PromptError(f"prompt {index} is empty: give at least one character")
    return tokens


@dataclass(kw_only=True)
class TextStream:
    """Turns tokens of one sequence into text as they come, never showing half a character or part of a stop string.

    `finished` is true once a stop string was found; `text` then ends just before it.
    """

    tokenizer: Tokenizer
    stop: tuple[str, ...] = ()
    text: str = ""
    finished: bool = False
    _pending: list[int] = field(default_factory=list)  # tokens since `_context`, not all of whose text is out
    _context: list[int] = field(default_factory=list)  # tokens before: some tokenizers decode a first token differently
    _held: str = ""  # decoded, but may be the beginning of a stop string

    def push(self, token: int) -> str:
        """The text that this token settles."""
        if self.finished:
            return ""
        self._pending.append(token)
        return self._settle(self._new_text(final=False), final=False)

    def close(self) -> str:
        """What is still held back when no more tokens come."""
        return "" if self.finished else self._settle(self._new_text(final=True), final=True)

    def _new_text(self, *, final: bool) -> str:
        before = self.tokenizer.decode(self._context)
        after = self.tokenizer.decode(self._context + self._pending)
        if after.endswith(_INCOMPLETE) and not final:
            return ""
        self._context, self._pending = self._pending or self._context, []
        return after[len(before) :]

    def _settle(self, new: str, *, final: bool) -> str:
        text = self._held + new
        found = [at for at in (text.find(stop) for stop in self.stop) if at >= 0]
        if found:
            self.finished, keep = True, min(found)
        else:
            keep = len(text) if final else len(text) - self._overlap(text)
        out, self._held = text[:keep], "" if self.finished else text[keep:]
        self.text += out
        return out

    def _overlap(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) for stop in self.stop), default=1) - 1
        return next(
            (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self.stop)), 0
        )
