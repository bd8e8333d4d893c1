"""From what a user calls a model to a directory on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from seqmoe_jax.checkpoints.others import other_weights
from seqmoe_jax.errors import CheckpointError, ConfigError, SeqMoEError
from seqmoe_jax.inputs import MAX_INDEX, read_json
from seqmoe_jax.presets import did_you_mean

PATTERNS = (
    "*.json",
    "*.safetensors",
    "tokenizer*",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
    "*.jinja",
    "encoding/*",
)
LONGEST_NAME = 4096  # of a path on Linux
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve_model(model: str | Path) -> Path:
    """A local directory, `"demo"` (in the package) or a Hugging Face id (local cache, else download).

    Raises `CheckpointError` in one line where none of these gives a directory.
    """
    if not isinstance(model, str | Path):
        raise CheckpointError(f"expected a model as text or a path, got {type(model).__name__}")
    if len(str(model)) > LONGEST_NAME:
        raise CheckpointError(f"expected a model, got a name of {len(str(model))} characters; check the path")
    path = Path(os.path.expanduser(model))
    if model != "" and os.path.isdir(path):
        return path
    if os.path.exists(path) and model != "":
        advice = "give the directory it lies in"
        if str(model).lower().endswith(".gguf"):
            advice = "GGUF is not read: give the directory of the safetensors checkpoint that it was made from"
        raise CheckpointError(f"{model}: expected a model directory, got a file; {advice}")
    if model == "demo":
        return _demo()
    if isinstance(model, Path) or not HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"{model}: expected a model directory, a Hugging Face id like 'owner/name' or 'demo', got no "
            f"such directory{did_you_mean(str(model)) or '; check the path'}"
        )
    _check_is_no_path(model)
    return _from_hub(model)


def _check_is_no_path(model: str) -> None:
    """What is written like an id but begins with a directory that is here is a path with a mistake in it. The network
    is not asked for it."""
    owner = model.split("/")[0]
    if os.path.isdir(owner):
        raise CheckpointError(
            f"{model}: expected a model directory, got no such directory, though {owner}/ is here; check the path, or "
            "run elsewhere for the Hugging Face id of that name"
        )


def resolve_config(model: str) -> dict[str, Any]:
    """The `config.json` alone of what `resolve_model` takes: of a model on the Hub nothing else is downloaded."""
    if os.path.exists(os.path.expanduser(model)) or not HUB_ID.fullmatch(model):
        return read_config(resolve_model(model))
    _check_is_no_path(model)
    from huggingface_hub import hf_hub_download

    with _hub_faults(model):
        return read_json(Path(hf_hub_download(model, "config.json")))


def read_config(directory: str | Path) -> dict[str, Any]:
    """`config.json` of a model directory. Raises `ConfigError` where it is missing or not a JSON object."""
    path = Path(directory) / "config.json"
    if not os.path.lexists(path) and (other := other_weights(Path(directory))):
        raise ConfigError(f"{path}: expected it beside safetensors files, got no such file but {other[0]}; {other[1]}")
    return read_json(path)


def _demo() -> Path:
    path = Path(str(resources.files("seqmoe_jax") / "demo"))
    if not path.is_dir():
        raise CheckpointError(f"{path}: expected the demo model, got no such directory; reinstall seqmoe-jax")
    return path


def _from_hub(model: str) -> Path:
    # Imported here: most runs name a directory, and the package takes a while to import.
    from huggingface_hub import snapshot_download

    try:
        cached = Path(snapshot_download(model, local_files_only=True, allow_patterns=list(PATTERNS)))
        if (cached / "config.json").is_file() and _has_weights(cached):
            return cached
    except (OSError, ValueError):
        pass
    with _hub_faults(model):
        return Path(snapshot_download(model, allow_patterns=list(PATTERNS)))


@contextmanager
def _hub_faults(model: str) -> Iterator[None]:
    """Whatever a download raises, as one line."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "an error")
        advice = "check the id; for a gated model accept its licence and run `hf auth login`"
        raise CheckpointError(f"{model}: expected a model on the Hugging Face Hub, got {status}; {advice}") from error
    except SeqMoEError:
        raise
    except Exception as error:  # whatever the HTTP client of the day raises for no network
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        advice = "connect to the network, or download it elsewhere (`hf download`) and give the directory"
        raise CheckpointError(
            f"{model}: expected it in the local Hugging Face cache or on the Hub, got {reason}; {advice}"
        ) from error


def _has_weights(directory: Path) -> bool:
    """Whether every weight file is there: an interrupted download leaves a snapshot with some of them."""
    if (directory / "model.safetensors").is_file():
        return True
    try:
        weight_map = read_json(directory / "model.safetensors.index.json", most=MAX_INDEX).get("weight_map", {})
        return bool(weight_map) and all(os.path.isfile(directory / str(name)) for name in set(weight_map.values()))
    except (ConfigError, AttributeError, TypeError):
        return False
