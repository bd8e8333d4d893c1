"""Tokenizers of model directories: `tokenizer.json`, tiktoken's `*.tiktoken`, sentencepiece's `tokenizer.model`.

All give the same face, so nothing after loading knows which file it was.
"""

from __future__ import annotations

import base64
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from seqmoe_jax.checkpoints.resolve import read_json
from seqmoe_jax.errors import CheckpointError, ConfigError, PromptError


@runtime_checkable
class Tokenizer(Protocol):
    """`vocab`: ids from there on stand for nothing; the model's head may have rows for them all the same."""

    @property
    def vocab(self) -> int: ...

    def encode(self, text: str, *, bare: bool = False) -> list[int]:
        """Ids of a text; names of special tokens in it become those tokens. `bare`: without BOS and the like."""
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
        return TiktokenTokenizer(ranks[0], family=family, added=_added_tokens(directory))
    if (directory / "tokenizer.model").is_file():
        add_bos = bool(_tokenizer_config(directory).get("add_bos_token", True))
        return SentencePieceTokenizer(directory / "tokenizer.model", added=_added_tokens(directory), add_bos=add_bos)
    raise CheckpointError(
        f"{directory / 'tokenizer.json'}: expected the model's tokenizer (or a *.tiktoken or tokenizer.model file), "
        "got no such file; copy it there from the model's page"
    )


class FileTokenizer:
    """A `tokenizer.json`. Raises `CheckpointError` where it is missing or damaged."""

    def __init__(self, directory: Path):
        import tokenizers  # takes a while to import; not needed for token ids

        path = directory / "tokenizer.json"
        with _reading(path):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        known = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab = 1 + max((known | _added_tokens(directory).ids).values(), default=-1)
        config = _tokenizer_config(directory)
        # Some files leave the BOS to tokenizer_config.json (DeepSeek), most add it themselves.
        bos = special_token(config, "bos_token") if config.get("add_bos_token") is True else None
        self._bos: list[int] = [] if bos is None else self._tokenizer.encode(bos, add_special_tokens=False).ids

    def encode(self, text: str, *, bare: bool = False) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=not bare).ids
        return ids if bare or ids[: len(self._bos)] == self._bos else self._bos + ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


class AddedTokens(NamedTuple):
    """Tokens that a `tokenizer_config.json` adds: ids by name, and which of them are left out of text."""

    ids: dict[str, int]
    hidden: frozenset[int]


NO_TOKENS = AddedTokens({}, frozenset())


@dataclass(frozen=True, kw_only=True)
class _Splitting:
    """What a `*.tiktoken` file leaves unsaid: the pattern that splits text, the tokens after its ranks, NFC or not."""

    pattern: str
    added: tuple[str, ...]
    shown: frozenset[str] = frozenset()  # of the added: those that are text
    nfc: bool = False

    def tokens(self, ranks: int) -> AddedTokens:
        ids = {name: ranks + i for i, name in enumerate(self.added)}
        return AddedTokens(ids, frozenset(token for name, token in ids.items() if name not in self.shown))


_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}LETTER]+|\p{N}| ?[^\s\p{L}LETTER\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_QWEN_HIDDEN = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_QWEN_SHOWN = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
_QWEN_SOUND = (
    "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>",
    "<|audio_pad|>",
)  # fmt: skip
_HARMONY = {0: "startoftext", 1: "endoftext", 4: "return", 5: "constrain", 7: "channel", 8: "start", 9: "end",
            10: "message", 14: "call"}  # fmt: skip
_qwen = partial(_Splitting, shown=frozenset(_QWEN_SHOWN), nfc=True)
_SPLITTINGS: Mapping[str, _Splitting] = {  # by the beginning of model_type, longest first
    "qwen3_5": _qwen(  # Qwen3.5 and 3.6: marks go with letters
        pattern=_QWEN.replace("LETTER", r"\p{M}"), added=(*_QWEN_HIDDEN, *_QWEN_SHOWN, *_QWEN_SOUND)
    ),
    "qwen": _qwen(pattern=_QWEN.replace("LETTER", ""), added=(*_QWEN_HIDDEN, *_QWEN_SHOWN)),
    # o200k_harmony: its file ends at rank 199,997, and the ids after it count on from there.
    "gpt_oss": _Splitting(
        pattern=_O200K, added=tuple(f"<|{_HARMONY.get(i, f'reserved_{199998 + i}')}|>" for i in range(21))
    ),
}


class TiktokenTokenizer:
    """A `*.tiktoken` file: lines of a base64 token and its rank (Qwen, GPT-OSS). Needs the package `tiktoken`.

    `added` are tokens of `tokenizer_config.json`; they come on top of the family's own.
    """

    def __init__(self, path: Path, *, family: str, added: AddedTokens = NO_TOKENS):
        tiktoken = _import("tiktoken", path)
        known = next((kind for name, kind in _SPLITTINGS.items() if family.startswith(name)), None)
        if known is None:
            raise ConfigError(
                f"{path}: how model_type {family!r} splits text is not known, only {', '.join(_SPLITTINGS)}; copy the "
                "model's tokenizer.json there instead"
            )
        self._nfc = known.nfc
        with _reading(path):
            pairs = (line.split() for line in path.read_bytes().splitlines() if line)
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
            # One that is missing becomes a crash in the library's compiled part.
            if any(bytes((byte,)) not in ranks for byte in range(256)):
                raise ValueError("ranks that lack some of the 256 single bytes")
            own = known.tokens(len(ranks))
            self._encoding = tiktoken.Encoding(
                path.stem, pat_str=known.pattern, mergeable_ranks=ranks, special_tokens=own.ids | added.ids
            )
        self._hidden = own.hidden | added.hidden
        self.vocab = self._encoding.max_token_value + 1

    def encode(self, text: str, *, bare: bool = False) -> list[int]:
        text = unicodedata.normalize("NFC", text) if self._nfc else text
        return self._encoding.encode(text, allowed_special="all")

    def decode(self, tokens: Sequence[int]) -> str:
        return self._encoding.decode([token for token in tokens if token not in self._hidden])


class SentencePieceTokenizer:
    """A sentencepiece `tokenizer.model` (Mixtral and others of that time). Needs the package `sentencepiece`."""

    def __init__(self, path: Path, *, added: AddedTokens = NO_TOKENS, add_bos: bool = True):
        sentencepiece = _import("sentencepiece", path)
        with _reading(path):
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        own = {self._model.id_to_piece(i): i for i in range(self._model.vocab_size()) if self._model.is_control(i)}
        self._special = own | added.ids
        self._hidden = added.hidden | set(own.values())
        self._inside = self._model.vocab_size()
        self._names = {token: name for name, token in added.ids.items() if token >= self._inside}
        self._split = re.compile("|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) or r"(?!)")
        self._bos = [self._model.bos_id()] if add_bos and self._model.bos_id() >= 0 else []
        self.vocab = max(self._inside, 1 + max(self._special.values(), default=0))

    def encode(self, text: str, *, bare: bool = False) -> list[int]:
        ids = [] if bare or not text else list(self._bos)
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

    def encode(self, text: str, *, bare: bool = False) -> list[int]:
        return [byte % self.vocab for byte in text.encode("utf-8")]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token % 256 for token in tokens).decode("utf-8", errors="replace")


def encode_prompt(tokenizer: Tokenizer, prompt: object, index: int = 0, *, bare: bool = False) -> list[int]:
    """Token ids of a prompt. Raises `PromptError` for what is empty or not text."""
    if not isinstance(prompt, str):
        raise PromptError(f"prompt {index} must be a string, got {type(prompt).__name__}")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise PromptError(f"prompt {index} is not Unicode text: it has half of a surrogate pair") from None
    tokens = tokenizer.encode(prompt, bare=bare) if prompt else []
    if not tokens:
        raise PromptError(f"prompt {index} is empty: give at least one character")
    return tokens


def special_token(config: Mapping[str, Any], name: str) -> str | None:
    """A token of `tokenizer_config.json`, written there as a string or as an object with its content."""
    value = config.get(name)
    return value.get("content") if isinstance(value, dict) else value


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def _added_tokens(directory: Path) -> AddedTokens:
    """`added_tokens_decoder` of `tokenizer_config.json`, and `added_tokens.json`. Raises `ConfigError`."""
    plain = directory / "added_tokens.json"
    listed = _tokenizer_config(directory).get("added_tokens_decoder") or {}
    try:
        ids = {name: int(token) for name, token in (read_json(plain) if plain.is_file() else {}).items()}
        ids |= {str(entry["content"]): int(token) for token, entry in listed.items()}
        shown = {int(token) for token, entry in listed.items() if not entry.get("special", True)}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{directory / 'tokenizer_config.json'}: added_tokens_decoder must hold objects with a content by token "
            "id, and added_tokens.json ids by content"
        ) from None
    return AddedTokens(ids, frozenset(ids.values()) - shown)


def _import(package: str, path: Path) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise ConfigError(
            f"{path}: reading this file needs the package {package}; pip install 'seqmoe-jax[tokenizers-extra]', or "
            "copy the model's tokenizer.json there"
        ) from None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever a tokenizer library raises over a file, as one line."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # libraries written in Rust raise bare Exception, or a panic that is not even that
        reason = " ".join(str(error).split())[:100]
        raise CheckpointError(f"{path}: expected a tokenizer, got {reason}; download the file again") from error
