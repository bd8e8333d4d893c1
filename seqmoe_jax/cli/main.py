"""The `seqmoe` command. Every fault of input is one line on standard error and exit status 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from seqmoe_jax import __version__
from seqmoe_jax.errors import SeqMoEError


class Command(NamedTuple):
    """A command and the module that has its arguments and runs it, which is imported when the command is used."""

    name: str
    help: str
    module: str
    arguments: str = "add_arguments"
    run: str = "run"


COMMANDS = (
    Command("generate", "generate text", "cli.generate"),
    Command("serve", "an OpenAI-compatible HTTP server", "cli.serve"),
    Command("plan", "will a model fit, at which residency, what it needs", "cli.plan"),
    Command("trace", "record the expert activations of a model on prompts", "cli.trace"),
    Command("stretch-trace", "a trace made into one of a larger shape", "cli.stretch_trace"),
    Command("simulate", "hit rate, transfers and share of full load, from a trace", "cli.simulate"),
    Command("train-predictor", "train a predictor of expert activations on a trace", "cli.predictor",
            "add_train_arguments", "train"),
    Command("evaluate", "recall of a predictor beside the baselines, on a trace", "cli.predictor",
            "add_evaluate_arguments", "evaluate"),
    Command("bench", "measured speed and where the time goes, with routing from a trace", "cli.bench"),
    Command("plot", "recall, hit rate, activations or benchmarks as an image", "cli.plot"),
    Command("doctor", "what this machine has: backend, memories, link bandwidth, kernels", "cli.doctor"),
)  # fmt: skip


def build_parser(used: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, with the arguments of the one that is `used`."""
    parser = argparse.ArgumentParser(
        prog="seqmoe", description="Mixture-of-Experts models with most experts outside device memory, exactly."
    )
    parser.add_argument("--version", action="version", version=f"seqmoe {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    for command in COMMANDS:
        each = commands.add_parser(command.name, help=command.help, description=command.help)
        if command.name == used:
            module = import_module(f"seqmoe_jax.{command.module}")
            getattr(module, command.arguments)(each)
            each.set_defaults(run=getattr(module, command.run))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status: 0, 1 for what does not fit, 2 for bad input, 130 for an interrupt."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser(words[0] if words else None)
    args = parser.parse_args(words)
    if args.run is None:
        parser.print_help()
        return 0
    _let_jax_use_memory()
    try:
        return int(args.run(args))
    except SeqMoEError as error:
        print(f"seqmoe: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nseqmoe: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def _let_jax_use_memory() -> None:
    """JAX reads these when it starts. It would otherwise take 75 % of a GPU's memory, and pin 64 GB of the host's."""
    from seqmoe_jax.host_memory import host_memory_bytes

    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(max(64, host_memory_bytes() >> 30)))
