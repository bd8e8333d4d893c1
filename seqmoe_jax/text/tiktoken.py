"""`*.tiktoken` files hold a base64 token and its rank per line, and no more.

How text is split before its tokens are looked up, and which special tokens follow the ranks, depends on the family.
"""

from __future__ import annotations

import base64
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from seqmoe_jax.errors import ConfigError
from seqmoe_jax.text.tokenizer_files import NO_TOKENS, AddedTokens, import_package, reading


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
        tiktoken = import_package("tiktoken", path)
        known = next((kind for name, kind in _SPLITTINGS.items() if family.startswith(name)), None)
        if known is None:
            raise ConfigError(
                f"{path}: how model_type {family!r} splits text is not known, only {', '.join(_SPLITTINGS)}; copy the "
                "model's tokenizer.json there instead"
            )
        self._nfc = known.nfc
        with reading(path):
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

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        text = unicodedata.normalize("NFC", text) if self._nfc else text
        return self._encoding.encode(text, allowed_special="all")

    def decode(self, tokens: Sequence[int]) -> str:
        return self._encoding.decode([token for token in tokens if token not in self._hidden])
