"""A file of prompts to record a trace from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from seqmoe_jax.errors import PromptError
from seqmoe_jax.fields import Fields, shown
from seqmoe_jax.inputs import parse_json, read_text

FIELDS = ("prompt", "split", "temperature")
MAX_PROMPTS = 1 << 28  # bytes of a file


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
    lines = read_text(path, "a file of prompts", most=MAX_PROMPTS, error=PromptError, pipes=True).split("\n")
    parse = _from_json if path.suffix == ".jsonl" else lambda line, where: Prompt(text=line)
    prompts = [parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise PromptError(f"{path} has no prompts: expected one per line, or JSON objects with 'prompt' in a .jsonl")
    if len({prompt.split is None for prompt in prompts}) > 1:
        raise PromptError(f"{path}: either every prompt has a 'split' or none has")
    return prompts


def _from_json(line: str, where: str) -> Prompt:
    value = parse_json(line, where, error=PromptError)
    if not isinstance(value, dict):
        raise PromptError(f"{where}: expected a JSON object with 'prompt', got {shown(value)}")
    fields = Fields(value, where, error=PromptError)
    fields.only(*FIELDS)
    return Prompt(
        text=fields.text("prompt", least=1, most=MAX_PROMPTS),
        split=fields.text("split", None, least=1, most=100),
        temperature=fields.number("temperature", None, least=0, most=1e6),
    )
