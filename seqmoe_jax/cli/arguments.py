"""Arguments that several commands share. What each means is said where the options are, in `seqmoe_jax.options`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, get_args

from seqmoe_jax.cli.terminal import text
from seqmoe_jax.errors import OutputError
from seqmoe_jax.options import MAX_BATCH, EngineKeywords, EngineOptions, GenerateOptions, Scheduler, meanings
from seqmoe_jax.outputs.files import check_file
from seqmoe_jax.outputs.runs import Run

if TYPE_CHECKING:
    from seqmoe_jax.api import Engine

MODEL = "directory, Hugging Face id, 'demo' (default), or a preset"
MOST = 2**31 - 1  # of whatever an option counts
SAMPLING = ("sampling", "temperature", "top_k", "top_p", "min_p", "seed")


def number(word: str) -> float:
    """A finite number. What range an option has is said where it is."""
    try:
        if math.isfinite(value := float(word)):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be a number, got {word!r}")


def integer(word: str) -> int:
    try:
        return int(word)
    except ValueError:  # also of thousands of digits
        raise argparse.ArgumentTypeError(f"must be a whole number, got {word!r}") from None


def number_above(low: float | int, most: float | int = MOST) -> Callable[[str], float]:
    """The type of an argument that is a finite number above `low` and at most `most`."""

    def parse(word: str) -> float:
        if low < (value := number(word)) <= most:
            return value
        raise argparse.ArgumentTypeError(f"must be above {low:g} and at most {most}, got {word}")

    return parse


def integer_from(least: int, most: int = MOST) -> Callable[[str], int]:
    """The type of an argument that is a whole number from `least` to `most`."""

    def parse(word: str) -> int:
        if least <= (value := integer(word)) <= most:
            return value
        raise argparse.ArgumentTypeError(f"must be from {least} to {most}, got {word}")

    return parse


positive, natural, batch = integer_from(1), integer_from(0), integer_from(1, MAX_BATCH)
above_zero, share = number_above(0), number_above(0, 1)


def residency(word: str) -> float | str:
    try:
        return word if word == "least" else number(word)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be a number in (0, 1] or 'least', got {word!r}") from None


# How the fields of options are written as arguments.
_WRITTEN: dict[str, dict[str, Any]] = {
    "residency": dict(type=residency, metavar="R"),
    "device_memory": dict(metavar="SIZE"),
    "policy": dict(metavar="NAME"),
    "predictor": dict(metavar="auto|DIR|none"),
    "transfers": dict(metavar="ENGINE"),
    "max_batch": dict(type=integer, metavar="B"),
    "context": dict(type=integer, metavar="N"),
    "dtype": dict(),
    "kernels": dict(choices=["xla", "gpu", "tpu"]),
    "decode_kernels": dict(action=argparse.BooleanOptionalAction),
    "scheduler": dict(choices=get_args(Scheduler)),
    "tasks": dict(type=integer, metavar="N"),
    "threshold": dict(type=number, metavar="P"),
    "refine": dict(action=argparse.BooleanOptionalAction),
    "max_new_tokens": dict(type=integer, metavar="N"),
    "stop": dict(action="append", type=text, metavar="TEXT"),
    "sampling": dict(choices=["greedy", "model"]),
    "temperature": dict(type=number),
    "top_k": dict(type=integer),
    "top_p": dict(type=number),
    "min_p": dict(type=number),
    "seed": dict(type=integer),
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
            meaning = said[field.name].replace("%", "%%").rstrip(".")
            shown = "" if field.default is None else " (default: %(default)s)"
            arguments = {"default": field.default, "help": meaning + shown} | changed
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


def load_engine(
    args: argparse.Namespace, *, progress: bool | None, warm_up: bool = False, **given: Unpack[EngineKeywords]
) -> Engine:
    from seqmoe_jax.api import load

    options = engine_options(args, **given)
    return load(args.model, random_weights=args.random_weights, warm_up=warm_up, progress=progress, **options)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How tokens are drawn, as `generate_options` reads it."""
    add_options(parser, GenerateOptions, SAMPLING)


def generate_options(args: argparse.Namespace, **given: Any) -> GenerateOptions:
    """The options that the arguments choose. A fault in them shows here, before a model is loaded."""
    chosen = {field.name: getattr(args, field.name) for field in fields(GenerateOptions) if hasattr(args, field.name)}
    return GenerateOptions(**{**chosen, **given})


def output(word: str) -> Path:
    """The file that a result goes to, which can be written."""
    try:
        check_file(word)
    except OutputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(word)


def add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="replace what is there of another kind or run")


def add_json(parser: argparse.ArgumentParser, said: str = "machine-readable output") -> None:
    parser.add_argument("--json", action="store_true", help=said)


def progress_of(args: argparse.Namespace) -> bool | None:
    """Whether loading shows what it does: on a terminal, and where people read the output."""
    return True if sys.stderr.isatty() or not args.json else None


def run_of(args: argparse.Namespace, **more: Any) -> Run:
    """What a result depends on that a command writes: its arguments, but those that say where it goes."""
    said = {name: value for name, value in vars(args).items() if name not in _WHERE and not callable(value)}
    return {name: str(value) if isinstance(value, Path) else value for name, value in (said | more).items()}


_WHERE = ("out", "plot", "json", "force")
