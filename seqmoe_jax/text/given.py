"""Tokenizers that callers bring along, and the lack of one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqmoe_jax.checkpoints.resolve import resolve_model
from seqmoe_jax.errors import ConfigError, PromptError
from seqmoe_jax.text.tokenizers import FileTokenizer, Tokenizer, open_tokenizer


@dataclass(frozen=True, kw_only=True)
class TokenIds:
    """No tokenizer: prompts are token ids, and there is no text of what is generated."""

    vocab: int

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise PromptError("this engine has no tokenizer: give token ids as the prompt, or load with tokenizer=...")

    def decode(self, tokens: Sequence[int]) -> str:
        return ""


class GivenTokenizer:
    """An object with `encode` and `decode` as a `Tokenizer`: of transformers, sentencepiece, Tunix or your own."""

    def __init__(self, tokenizer: Any, *, vocab: int):
        """`vocab` counts where the object does not say how many ids it has."""
        self._tokenizer = tokenizer
        own = getattr(tokenizer, "vocab_size", None)
        if callable(own):
            own = own()
        self.vocab = len(tokenizer) if hasattr(tokenizer, "__len__") else own or vocab
        self._encode_takes, self._decode_takes = _keywords(tokenizer.encode), _keywords(tokenizer.decode)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        told = {"add_special_tokens": add_special_tokens} if "add_special_tokens" in self._encode_takes else {}
        return [int(token) for token in self._tokenizer.encode(text, **told)]

    def decode(self, tokens: Sequence[int]) -> str:
        told = {"skip_special_tokens": True} if "skip_special_tokens" in self._decode_takes else {}
        return str(self._tokenizer.decode(list(tokens), **told))


def tokenizer_of(given: Tokenizer | str | Path | Any, family: str, *, vocab: int) -> Tokenizer:
    """What a caller means: a directory or Hugging Face id with a tokenizer, or an object that is one.

    Raises `ConfigError` for what has no `encode` and `decode`, `CheckpointError` for a directory without one.
    """
    if isinstance(given, str | Path):
        return open_tokenizer(resolve_model(given), family)
    if type(given).__module__.split(".")[0] == "tokenizers":
        whole: Any = given
        return FileTokenizer(whole)
    if not all(callable(getattr(given, name, None)) for name in ("encode", "decode")):
        raise ConfigError(
            f"tokenizer must be a directory, a Hugging Face id or an object with encode and decode, got "
            f"{type(given).__name__}"
        )
    if isinstance(given, Tokenizer) and isinstance(given.vocab, int):
        return given
    return GivenTokenizer(given, vocab=vocab)


def _keywords(function: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except ValueError:  # of compiled code
        return frozenset()
