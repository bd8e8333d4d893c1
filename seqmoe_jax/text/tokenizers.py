"""Tokenizers of model directories: `tokenizer.json`, tiktoken's `*.tiktoken`, sentencepiece's `tokenizer.model`.

All of them are a `Tokenizer`, so nothing after loading knows which file it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from seqmoe_jax.errors import CheckpointError, ConfigError, PromptError
from seqmoe_jax.text.sentencepiece import tokenizer_of_pieces
from seqmoe_jax.text.side_tokens import add_to, read_side_tokens
from seqmoe_jax.text.tiktoken import TiktokenTokenizer
from seqmoe_jax.text.tokenizer_files import added_tokens, check_flags, read_if_there, reading
from seqmoe_jax.text.tokenizer_kinds import kind_of

if TYPE_CHECKING:
    import tokenizers

_LONG = 10_000  # characters from which on encoding lets other threads run meanwhile, which costs a little


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

    `family` is the `model_type`: of some of them the library that made the file has rules of its own, and a
    `*.tiktoken` file says neither how text is split nor what is special. Raises `CheckpointError` where there is none
    or it is damaged, `ConfigError` where it cannot be used.
    """
    if (directory / "tokenizer.json").is_file():
        return FileTokenizer(tokenizer_of_file(directory, family))
    ranks = sorted(directory.glob("*.tiktoken"))
    if ranks:
        return TiktokenTokenizer(ranks[0], family=family, added=added_tokens(directory))
    if (directory / "tokenizer.model").is_file():
        return FileTokenizer(tokenizer_of_pieces(directory, family))
    raise CheckpointError(
        f"{directory / 'tokenizer.json'}: expected the model's tokenizer (or a *.tiktoken or tokenizer.model file), "
        "got no such file; copy it there from the model's page"
    )


def tokenizer_of_file(directory: Path, family: str) -> tokenizers.Tokenizer:
    """A `tokenizer.json` with what stands beside it, as transformers reads both.

    Raises `CheckpointError` where it is damaged, `ConfigError` where something beside it is not supported.
    """
    import tokenizers  # takes a while to import; not needed for token ids

    path = directory / "tokenizer.json"
    config = read_if_there(directory / "tokenizer_config.json")
    kind = kind_of(directory, family)
    with reading(path):
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    bpe = isinstance(tokenizer.model, tokenizers.models.BPE)
    check_flags(config, str(directory / "tokenizer_config.json"), bpe=bpe)
    tokens = read_side_tokens(
        directory,
        defaults=pad_token(tokenizer.padding) | {**(kind.defaults if kind else {})},
        own=tokenizer.get_added_tokens_decoder(),
    )
    if kind is not None:
        if not bpe:
            raise ConfigError(f"{path}: expected a BPE model, as {family} has it, got {type(tokenizer.model).__name__}")
        ends = None if kind.own_ends else tokenizer.post_processor
        tokenizer = tokenizers.Tokenizer(_plain(tokenizer.model))
        kind.rebuild(tokenizer, config)
        if ends is not None:
            tokenizer.post_processor = ends
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    add_to(tokenizer, tokens)
    if kind is not None and kind.respecial:
        names = dict.fromkeys(str(getattr(t, "content", t)) for t in (*tokens.named.values(), *tokens.extra))
        tokenizer.add_tokens([tokenizers.AddedToken(name, special=True) for name in names])
    return tokenizer


def pad_token(padding: Mapping[str, Any] | None) -> dict[str, str]:
    """The token that a `tokenizer.json` pads with, which is special."""
    return {"pad_token": str(padding["pad_token"])} if padding else {}


def _plain(model: tokenizers.models.BPE) -> tokenizers.models.BPE:
    """The same vocabulary and merges without the file's other settings."""
    model.unk_token = model.dropout = None
    model.continuing_subword_prefix = model.end_of_word_suffix = ""
    model.fuse_unk = model.byte_fallback = model.ignore_merges = False
    return model


class FileTokenizer:
    """A tokenizer of the library `tokenizers`, or the one of a directory."""

    def __init__(self, tokenizer: tokenizers.Tokenizer | Path, family: str = ""):
        self._tokenizer = tokenizer_of_file(tokenizer, family) if isinstance(tokenizer, Path) else tokenizer
        # What files say of both is for training: prompts are neither cut nor filled up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) < _LONG:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        return list(self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


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
