"""Tokens that stand beside a tokenizer: in `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`.

Which of them counts is as in transformers 5 (`tokenization_utils_base.py`, `_from_pretrained`): where
`tokenizer_config.json` has an `added_tokens_decoder`, neither of the older files; else those, and
`special_tokens_map.json` over `tokenizer_config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqmoe_jax.errors import ConfigError
from seqmoe_jax.fields import shown
from seqmoe_jax.text.tokenizer_files import read_if_there

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, kw_only=True)
class SideTokens:
    """`named`: tokens with a part to play, such as `bos_token`; `extra`: special ones without a name; `added`: what
    was added to the vocabulary, by id."""

    named: Mapping[str, AddedToken | str] = field(default_factory=dict)
    extra: tuple[AddedToken | str, ...] = ()
    added: Mapping[int, AddedToken] = field(default_factory=dict)


def read_side_tokens(
    directory: Path, *, defaults: Mapping[str, str], own: Mapping[int, AddedToken] | None = None
) -> SideTokens:
    """The tokens of a directory's JSON files.

    `defaults`: names that the tokenizer has where no file says otherwise; `own`: what `tokenizer.json` adds itself.
    Raises `ConfigError` for what is no token.
    """
    config = read_if_there(directory / "tokenizer_config.json")
    try:
        named = {name: value for name, value in config.items() if name in NAMES or _is_named(name, value)}
        extra = config.get("extra_special_tokens", config.get("additional_special_tokens"))
        if "added_tokens_decoder" in config:
            added = {int(token): _token(value) for token, value in config["added_tokens_decoder"].items()}
        else:
            older = read_if_there(directory / "special_tokens_map.json")
            named |= {name: value for name, value in older.items() if name in NAMES or _is_named(name, value)}
            if isinstance(more := older.get("extra_special_tokens"), list):
                extra = [*(extra or []), *more]
            elif more is not None:
                extra = more
            standard = [named.get(name) for name in NAMES]
            special = {_name(token) for token in [*standard, *(extra or [])] if token}
            added = _older_added(directory, own or {}, special)
            if extra is None:  # too late for the tokens of added_tokens.json, as it is there
                extra = older.get("additional_special_tokens")
        if isinstance(extra, dict):
            named, extra = named | extra, None
        by_name = {token.content: token for token in added.values()}
        given = {
            name: by_name.get(_name(value), _token_or_text(value)) for name, value in named.items() if value is not None
        }
        kept = {**defaults} | dict.fromkeys(named) | given
        return SideTokens(
            named={name: token for name in [*NAMES, *kept] if (token := kept.get(name)) is not None},
            extra=tuple(_token_or_text(token) for token in extra or ()),
            added=added,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:100]
        raise ConfigError(
            f"{directory / 'tokenizer_config.json'} and the files beside it: expected special tokens as text or as "
            f"objects with a content, and added_tokens_decoder as such objects by token id; {reason}"
        ) from None


def names_of(tokens: SideTokens) -> dict[str, str]:
    """The tokens that have a name, as chat templates see them."""
    return {name: str(_name(token)) for name, token in tokens.named.items()}


def add_to(tokenizer: Tokenizer, tokens: SideTokens) -> None:
    """Makes the tokenizer know these tokens, those that it knows already with the flags that the files give them.

    One that is not in the vocabulary gets the next free id, whatever id the file has for it.
    """
    from tokenizers import AddedToken

    known = tokenizer.get_added_tokens_decoder().values()
    same = {repr(token) for token in known}
    fresh: list[AddedToken | str] = [token for _, token in sorted(tokens.added.items()) if repr(token) not in same]
    seen = {token.content for token in known} | {_name(token) for token in fresh}
    for token in (*tokens.named.values(), *tokens.extra):
        if _name(token) not in seen:
            fresh.append(token)
            seen.add(_name(token))
    parts = {_name(token) for token in tokens.named.values()}
    made = [AddedToken(token, special=True) if isinstance(token, str) else token for token in fresh]
    for token in made:
        token.special |= token.content in parts
    tokenizer.add_tokens(made)


def _is_named(name: str, value: object) -> bool:
    """`image_token` and the like: a model's own names. `add_bos_token` is none, it is true or false."""
    return name.endswith("_token") and isinstance(value, (str, dict))


def _older_added(directory: Path, own: Mapping[int, AddedToken], special: set[str]) -> dict[int, AddedToken]:
    """`added_tokens.json`, and over it the added tokens of `tokenizer.json`."""
    from tokenizers import AddedToken

    added = {
        int(token): AddedToken(name, normalized=name not in special, special=name in special)
        for name, token in read_if_there(directory / "added_tokens.json").items()
    }
    return added | {**own}


def _name(token: Any) -> str:
    name = token["content"] if isinstance(token, dict) else getattr(token, "content", token)
    if not isinstance(name, str):
        raise TypeError(f"got {shown(name)}")
    return name


def _token(value: Any) -> AddedToken:
    from tokenizers import AddedToken

    flags = {name: bool(value[name]) for name in _FLAGS if name in value}
    return AddedToken(_name(value), **flags)


def _token_or_text(value: Any) -> AddedToken | str:
    if isinstance(value, str):
        return value
    return _token(value if "__type" in value else {**value, "special": True})
