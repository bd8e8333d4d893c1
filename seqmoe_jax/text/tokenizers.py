"""Tokenizers of model directories: `tokenizer.json`, tiktoken's `*.tiktoken`, sentencepiece's `tokenizer.model`.

All of them are a `Tokenizer`, so nothing after loading knows which file it was.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol, runtime_checkable

from seqmoe_jax.errors import CheckpointError, PromptError
from seqmoe_jax.text.tiktoken import TiktokenTokenizer
from seqmoe_jax.text.tokenizer_files import (
    NO_TOKENS,
    AddedTokens,
    added_tokens,
    import_package,
    reading,
    special_token,
    tokenizer_config,
)


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back. Ids from `vocab` on stand for nothing, even where the head has rows for them."""

    @property
    def vocab(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; names of special tokens in it become those tokens.

        `add_special_tokens`: with BOS and the like, where the model has them.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        ...


def open_tokenizer(directory: Path, family: str = "") -> Tokenizer:
    """The tokenizer of a model directory, of whichever format is there, `tokenizer.json` first.

    `family` is the `model_type`: a `*.tiktoken` file says neither how text is split nor what is special. Raises
    `CheckpointError` where there is none or it is damaged, `ConfigError` where it cannot be used.
    """
    if (directory / "tokenizer.json").is_file():
        return FileTokenizer(directory)
    ranks = sorted(directory.glob("*.tiktoken"))
    if ranks:
        return TiktokenTokenizer(ranks[0], family=family, added=added_tokens(directory))
    if (directory / "tokenizer.model").is_file():
        add_bos = bool(tokenizer_config(directory).get("add_bos_token", True))
        return SentencePieceTokenizer(directory / "tokenizer.model", added=added_tokens(directory), add_bos=add_bos)
    raise CheckpointError(
        f"{directory / 'tokenizer.json'}: expected the model's tokenizer (or a *.tiktoken or tokenizer.model file), "
        "got no such file; copy it there from the model's page"
    )


class FileTokenizer:
    """A `tokenizer.json`. Raises `CheckpointError` where it is missing or damaged."""

    def __init__(self, directory: Path):
        import tokenizers  # takes a while to import; not needed for token ids

        path = directory / "tokenizer.json"
        with reading(path):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # What the file says of both is for training: prompts are neither cut nor filled up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        known = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab = 1 + max((known | added_tokens(directory).ids).values(), default=-1)
        config = tokenizer_config(directory)
        # Some files leave the BOS to tokenizer_config.json (DeepSeek), most add it themselves.
        bos = special_token(config, "bos_token") if config.get("add_bos_token") is True else None
        self._bos: list[int] = [] if bos is None else self._tokenizer.encode(bos, add_special_tokens=False).ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids if not add_special_tokens or ids[: len(self._bos)] == self._bos else self._bos + ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


class SentencePieceTokenizer:
    """A sentencepiece `tokenizer.model` (Mixtral and others of that time). Needs the package `sentencepiece`."""

    def __init__(self, path: Path, *, added: AddedTokens = NO_TOKENS, add_bos: bool = True):
        sentencepiece = import_package("sentencepiece", path)
        with reading(path):
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        own = {self._model.id_to_piece(i): i for i in range(self._model.vocab_size()) if self._model.is_control(i)}
        self._special = own | added.ids
        self._hidden = added.hidden | set(own.values())
        self._inside = self._model.vocab_size()
        self._names = {token: name for name, token in added.ids.items() if token >= self._inside}
        self._split = re.compile("|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) or r"(?!)")
        self._bos = [self._model.bos_id()] if add_bos and self._model.bos_id() >= 0 else []
        self.vocab = max(self._inside, 1 + max(self._special.values(), default=0))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = list(self._bos) if text and add_special_tokens else []
        at = 0
        for match in self._split.finditer(text):
            ids += [*self._model.encode(text[at : match.start()]), self._special[match.group()]]
            at = match.end()
        return ids + self._model.encode(text[at:])

    def decode(self, tokens: Sequence[int]) -> str:
        shown = [token for token in tokens if token not in self._hidden]
        runs = groupby(shown, key=lambda token: self._names.get(token))  # added tokens are not the model's to decode
        return "".join(self._model.decode(list(run)) if name is None else name * len(list(run)) for name, run in runs)


@dataclass(frozen=True, kw_only=True)
class ByteTokenizer:
    """UTF-8 bytes as ids, for models with random weights, which have no tokenizer."""

    vocab: int

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [byte % self.vocab for byte in text.encode("utf-8")]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token % 256 for token in tokens).decode("utf-8", errors="replace")


def encode_prompt(
    tokenizer: Tokenizer, prompt: object, index: int = 0, *, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of a prompt. Raises `PromptError` for what is empty or not text."""
    if not isinstance(prompt, str):
        raise PromptError(f"prompt {index} must be a string, got {type(prompt).__name__}")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise PromptError(f"prompt {index} is not Unicode text: it has half of a surrogate pair") from None
    tokens = tokenizer.encode(prompt, add_special_tokens=add_special_tokens) if prompt else []
    if not tokens:
        raise PromptError(f"prompt {index} is empty: give at least one character")
    return tokens
