"""A file of prompts to record a trace from."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from seqmoe_jax.errors import PromptError

FIELDS = ("prompt", "split", "temperature")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A text to continue; `split` and `temperature` are None where the file of prompts does not say."""

    text: str
    split: str | None = None
    temperature: float | None = None


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Prompts from a file: of a `.jsonl` the objects' `prompt` (with `split`, `temperature` if they have them), else
    one per line. Blank lines are skipped. Raises `PromptError` naming the line."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise PromptError(f"no file of prompts {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path}: expected a text file in UTF-8, got {error}") from None
    parse = _from_json if path.suffix == ".jsonl" else lambda line, where: Prompt(text=line)
    prompts = [parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise PromptError(f"{path} has no prompts: expected one per line, or JSON objects with 'prompt' in a .jsonl")
    if len({prompt.split is None for prompt in prompts}) > 1:
        raise PromptError(f"{path}: either every prompt has a 'split' or none has")
    return prompts


def _from_json(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where}: expected a JSON object, got {error}") from None
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str) or not value["prompt"]:
        raise PromptError(f"{where}: expected an object with a non-empty string 'prompt', got {line[:60]!r}")
    unknown = sorted(set(value) - set(FIELDS))
    if unknown:
        raise PromptError(f"{where}: unknown field {unknown[0]!r}; a prompt may have {', '.join(FIELDS)}")
    split, temperature = value.get("split"), value.get("temperature")
    if not (split is None or (isinstance(split, str) and split)):
        raise PromptError(f"{where}: expected 'split' to be a name such as \"train\", got {split!r}")
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not (temperature is None or (number and temperature >= 0)):
        raise PromptError(f"{where}: expected 'temperature' to be 0 or positive, got {temperature!r}")
    return Prompt(text=value["prompt"], split=split, temperature=temperature)
