"""Which pipeline a `tokenizer.json` runs in.

For most models it is the file's own. transformers 5 takes of some only the vocabulary and the merges, and has the rest
in a class: how text is normalised, split and put together again. Published files say the same as their class; where one
does not, the class counts, as it does there. Reference: `AutoTokenizer.from_pretrained` and the classes named here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqmoe_jax.errors import ConfigError
from seqmoe_jax.fields import Fields
from seqmoe_jax.text.tokenizer_files import read_if_there

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Rebuild = Callable[["Tokenizer", Mapping[str, Any]], None]

_GENERIC = ("PreTrainedTokenizer", "TokenizersBackend")
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}MARKS]+|\p{N}| ?[^\s\p{L}MARKS\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """`defaults`: special tokens that it has where no file names them; `respecial`: those are added once more as plain
    special tokens; `own_ends`: what the file adds around a text does not count; `pieces`: made for sentencepiece."""

    rebuild: Rebuild
    defaults: Mapping[str, str]
    respecial: bool = False
    own_ends: bool = False
    pieces: bool = False


def kind_of(directory: Path, family: str) -> Kind | None:
    """The class that counts for a model of this `model_type`; None where its file stands as it is.

    Raises `ConfigError` for a class that is not known here.
    """
    files = [directory / "tokenizer_config.json", directory / "config.json"]
    named = [Fields(read_if_there(path), str(path)).text("tokenizer_class", None) for path in files]
    registered = _REGISTERED.get(family)
    name = next(filter(None, named), registered)
    if registered in _GENERIC or name is None:
        return None
    if (name := name.removesuffix("Fast")) in _GENERIC:
        return None
    if name not in _KINDS:
        raise ConfigError(
            f"{files[0]}: tokenizer_class {name!r} is not supported for {family}, only {', '.join(_KINDS)}; where "
            "tokenizer.json says all of how text is split, set tokenizer_class to PreTrainedTokenizerFast"
        )
    return _KINDS[name]


def _qwen(marks: str) -> Rebuild:
    def rebuild(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
        from tokenizers import Regex, decoders, normalizers, pre_tokenizers

        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_QWEN_SPLIT.replace("MARKS", marks)), behavior="isolated", invert=False),
                pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")), use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()

    return rebuild


def _gpt_neox(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    from tokenizers import decoders, normalizers, pre_tokenizers

    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(config.get("add_prefix_space", False)), trim_offsets=True
    )
    tokenizer.decoder = decoders.ByteLevel()


def _llama(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    from tokenizers import decoders, pre_tokenizers

    prefix = config.get("add_prefix_space")
    prefix = True if prefix is None else bool(prefix)
    tokenizer.model.fuse_unk = tokenizer.model.byte_fallback = True
    scheme = ("always" if config.get("legacy", False) else "first") if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(content=" ", left=1)] if prefix else [])])


_ENDS = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
_KINDS: Mapping[str, Kind] = {
    "Qwen2Tokenizer": Kind(rebuild=_qwen(""), defaults=_ENDS, respecial=True),
    "Qwen3_5Tokenizer": Kind(rebuild=_qwen(r"\p{M}"), defaults=_ENDS),
    "GPTNeoXTokenizer": Kind(
        rebuild=_gpt_neox,
        defaults=_ENDS | {"bos_token": "<|endoftext|>", "pad_token": "<|padding|>"},
        own_ends=True,
    ),
    "LlamaTokenizer": Kind(
        rebuild=_llama, defaults={"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, pieces=True
    ),
}
_REGISTERED: Mapping[str, str] = {  # what transformers knows a model_type by; others are what their files name
    **dict.fromkeys(
        ("mixtral", "glm4_moe", "glm4_moe_lite", "granitemoe", "deepseek_v2", "deepseek_v3", "deepseek_v4"),
        "TokenizersBackend",
    ),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"),
    "qwen3_5_moe": "Qwen3_5Tokenizer",
    "olmoe": "GPTNeoXTokenizer",
}
