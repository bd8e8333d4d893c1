"""What the readers of tokenizer files share: the tokens that a model's JSON files add, and errors in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from seqmoe_jax.errors import CheckpointError, ConfigError
from seqmoe_jax.inputs import read_json


class AddedTokens(NamedTuple):
    """Tokens that a `tokenizer_config.json` adds: ids by name, and which of them are left out of text."""

    ids: dict[str, int]
    hidden: frozenset[int]


NO_TOKENS = AddedTokens({}, frozenset())


def special_token(config: Mapping[str, Any], name: str) -> str | None:
    """A token of `tokenizer_config.json`, written there as a string or as an object with its content."""
    value = config.get(name)
    return value.get("content") if isinstance(value, dict) else value


def special_tokens(directory: Path) -> dict[str, str]:
    """The tokens that a directory gives names to, such as `bos_token`, as chat templates see them."""
    config = tokenizer_config(directory)
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
    return {name: token for name in names if (token := special_token(config, name)) is not None}


def tokenizer_config(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def added_tokens(directory: Path) -> AddedTokens:
    """`added_tokens_decoder` of `tokenizer_config.json`, and `added_tokens.json`. Raises `ConfigError`."""
    plain = directory / "added_tokens.json"
    listed = tokenizer_config(directory).get("added_tokens_decoder") or {}
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


def import_package(package: str, path: Path) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise ConfigError(
            f"{path}: reading this file needs the package {package}; pip install 'seqmoe-jax[tokenizers-extra]', or "
            "copy the model's tokenizer.json there"
        ) from None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever a tokenizer library raises over a file, as one line."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # libraries written in Rust raise bare Exception, or a panic that is not even that
        reason = " ".join(str(error).split())[:100]
        raise CheckpointError(f"{path}: expected a tokenizer, got {reason}; download the file again") from error
