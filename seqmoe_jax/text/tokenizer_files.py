"""What the readers of tokenizer files share: the tokens that a model's JSON files add, and errors in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from seqmoe_jax.errors import CheckpointError, ConfigError
from seqmoe_jax.inputs import check_file, is_file, read_json


class AddedTokens(NamedTuple):
    """Tokens that a `tokenizer_config.json` adds: ids by name, and which of them are left out of text."""

    ids: dict[str, int]
    hidden: frozenset[int]


NO_TOKENS = AddedTokens({}, frozenset())


def read_if_there(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no file."""
    return read_json(path) if is_file(path) else {}


def added_tokens(directory: Path) -> AddedTokens:
    """`added_tokens_decoder` of `tokenizer_config.json`, and `added_tokens.json`. Raises `ConfigError`."""
    plain = read_if_there(directory / "added_tokens.json")
    listed = read_if_there(directory / "tokenizer_config.json").get("added_tokens_decoder") or {}
    try:
        ids = {name: int(token) for name, token in plain.items()}
        ids |= {str(entry["content"]): int(token) for token, entry in listed.items()}
        shown = {int(token) for token, entry in listed.items() if not entry.get("special", True)}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{directory / 'tokenizer_config.json'}: added_tokens_decoder must hold objects with a content by token "
            "id, and added_tokens.json ids by content"
        ) from None
    return AddedTokens(ids, frozenset(ids.values()) - shown)


def check_flags(config: Mapping[str, Any], where: str, *, bpe: bool = True) -> None:
    """Refuses what a `tokenizer_config.json` may ask for beyond its tokens, and is not done. Raises `ConfigError`."""
    cleaned = config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
    if config.get("clean_up_tokenization_spaces") and (cleaned or not bpe):
        raise ConfigError(
            f"{where}: clean_up_tokenization_spaces is not supported: it changes text that is out already; set it to "
            "false"
        )
    if config.get("fix_mistral_regex"):
        raise ConfigError(f"{where}: fix_mistral_regex is not supported; change the pattern in tokenizer.json instead")
    versions = config.get("fast_tokenizer_files")
    if isinstance(versions, list) and any(name != "tokenizer.json" for name in versions):
        raise ConfigError(
            f"{where}: fast_tokenizer_files is not supported: name the file that counts tokenizer.json, and leave it "
            "out"
        )


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
    check_file(path, "a tokenizer file", CheckpointError)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # libraries written in Rust raise bare Exception, or a panic that is not even that
        reason = " ".join(str(error).split())[:100]
        raise CheckpointError(f"{path}: expected a tokenizer, got {reason}; download the file again") from error
