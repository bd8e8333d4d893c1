"""Arguments that several commands share. What each means is said where the options are, in `seqmoe_jax.options`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, get_args

from seqmoe_jax.options import EngineKeywords, EngineOptions, GenerateOptions, Scheduler, meanings

if TYPE_CHECKING:
    from seqmoe_jax.api import Engine

MODEL = "directory, Hugging Face id, 'demo' (default), or a preset"
SAMPLING = ("sampling", "temperature", "top_k", "top_p", "min_p", "seed")


def residency(text: str) -> float | str:
    if text == "least":
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number in (0, 1] or 'least', got {text!r}") from None


# How the fields of options are written as arguments.
_WRITTEN: dict[str, dict[str, Any]] = {
    "residency": dict(type=residency, metavar="R"),
    "device_memory": dict(metavar="SIZE"),
    "policy": dict(metavar="NAME"),
    "predictor": dict(metavar="auto|DIR|none"),
    "transfers": dict(metavar="ENGINE"),
    "max_batch": dict(type=int, metavar="B"),
    "context": dict(type=int, metavar="N"),
    "dtype": dict(),
    "kernels": dict(choices=["xla", "gpu", "tpu"]),
    "decode_kernels": dict(action=argparse.BooleanOptionalAction),
    "scheduler": dict(choices=get_args(Scheduler)),
    "tasks": dict(type=int, metavar="N"),
    "threshold": dict(type=float, metavar="P"),
    "refine": dict(action=argparse.BooleanOptionalAction),
    "max_new_tokens": dict(type=int, metavar="N"),
    "stop": dict(action="append", metavar="TEXT"),
    "sampling": dict(choices=["greedy", "model"]),
    "temperature": dict(type=float),
    "top_k": dict(type=int),
    "top_p": dict(type=float),
    "min_p": dict(type=float),
    "seed": dict(type=int),
}


def add_options(
    parser: argparse._ActionsContainer, options: type, names: Sequence[str], *, flag: str | None = None, **changed: Any
) -> None:
    """Arguments for fields of `EngineOptions` or `GenerateOptions`: `--max-batch` for `max_batch`, or another `flag`.

    `changed` replaces what a field's default or help is elsewhere.
    """
    said = meanings(options)
    for field in fields(options):
        if field.name in names:
            text = said[field.name].replace("%", "%%").rstrip(".")
            shown = "" if field.default is None else " (default: %(default)s)"
            arguments = {"default": field.default, "help": text + shown} | changed
            name = flag or "--" + field.name.replace("_", "-")
            parser.add_argument(name, dest=field.name, **_WRITTEN[field.name] | arguments)


def add_load_arguments(parser: argparse.ArgumentParser, *, batch: bool = False) -> None:
    """What every command has that loads a model, as `load_engine` reads it. `batch`: the largest is chosen too."""
    parser.add_argument("model", nargs="?", default="demo", help=MODEL)
    usual = [field.name for field in fields(EngineOptions)]
    rare = usual[usual.index("decode_kernels") :]
    add_options(parser, EngineOptions, [name for name in usual if name not in rare and (batch or name != "max_batch")])
    add_options(parser.add_argument_group("what benchmarks vary"), EngineOptions, rare)
    parser.add_argument("--random-weights", action="store_true", help="MODEL is a preset of configs/")


def engine_options(args: argparse.Namespace, **given: Unpack[EngineKeywords]) -> EngineKeywords:
    """The options that the arguments choose; a field that the command has no argument for is one of those `given`."""
    chosen = {field.name: getattr(args, field.name) for field in fields(EngineOptions) if hasattr(args, field.name)}
    return EngineKeywords(**{**chosen, **given})  # type: ignore[typeddict-item]


def load_engine(args: argparse.Namespace, *, progress: bool | None, **given: Unpack[EngineKeywords]) -> Engine:
    from seqmoe_jax.api import load

    return load(args.model, random_weights=args.random_weights, progress=progress, **engine_options(args, **given))


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How tokens are drawn, as `generate_options` reads it."""
    add_options(parser, GenerateOptions, SAMPLING)


def generate_options(args: argparse.Namespace, **given: Any) -> GenerateOptions:
    """The options that the arguments choose. A fault in them shows here, before a model is loaded."""
    chosen = {field.name: getattr(args, field.name) for field in fields(GenerateOptions) if hasattr(args, field.name)}
    return GenerateOptions(**{**chosen, **given})


def output(text: str) -> Path:
    """Where a result goes. A name that ends in a slash, which a path does not keep, is one of a directory."""
    if not text or text.endswith("/"):
        raise argparse.ArgumentTypeError(f"must be the name of a file, got {text!r}")
    return Path(text)


def add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="replace what is there of another kind or run")


def add_json(parser: argparse.ArgumentParser, text: str = "machine-readable output") -> None:
    parser.add_argument("--json", action="store_true", help=text)


def progress_of(args: argparse.Namespace) -> bool | None:
    """Whether loading shows what it does: on a terminal, and where people read the output."""
    return True if sys.stderr.isatty() or not args.json else None
