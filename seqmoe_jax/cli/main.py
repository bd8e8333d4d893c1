"""The `seqmoe` command. Every fault of input is one line on standard error and exit status 2."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NamedTuple, NoReturn

from seqmoe_jax import __version__
from seqmoe_jax.cli.terminal import BROKEN_PIPE, flushed, open_streams
from seqmoe_jax.errors import ConfigError, SeqMoEError, one_line


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


class Parser(argparse.ArgumentParser):
    """One whose faults are one line, without the usage before it, which is longer than any terminal."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (-[^ =]+)", message)
        if message.endswith("expected one argument"):
            message += " (a text that begins with - is written --option=-TEXT)"
        if unknown and (close := difflib.get_close_matches(unknown[1], self.known)):
            message += f"; did you mean {' or '.join(close)}?"
        raise ConfigError(f"{message} (see {self.prog} --help)")

    known: Sequence[str] = ()  # options of the command that is used


def build_parser(used: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, with the arguments of the one that is `used`."""
    parser = Parser(
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
            parser.known = list(each._option_string_actions)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status: 0, 1 for what does not fit, 2 for bad input, 130 for an interrupt, 141
    where nobody reads what is printed."""
    open_streams()
    try:
        with flushed():
            return _run(sys.argv[1:] if argv is None else list(argv))
    except BrokenPipeError:  # whoever read what is printed has had enough
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except SeqMoEError as error:
        return _say(str(error), 2)
    except OSError as error:
        return _say(one_line(str(error)), 2)
    except MemoryError:
        return _say("this machine's memory is not enough", 2)
    except RuntimeError as error:
        if "initialize backend" not in str(error):
            raise
        return _say(one_line(str(error)), 2)  # JAX_PLATFORMS names a device that is not there


def _run(words: Sequence[str]) -> int:
    parser = build_parser(words[0] if words else None)
    args = parser.parse_args(words)
    if args.run is None:
        parser.print_help()
        return 0
    _let_jax_use_memory()
    return int(args.run(args))


def _say(what: str, status: int) -> int:
    with suppress(OSError):  # there may be nobody to say it to
        after = "\n" if status == 130 and sys.stderr.isatty() else ""  # ^C, or a progress bar
        print(f"{after}seqmoe: {what}", file=sys.stderr, flush=True)
    return status


def _let_jax_use_memory() -> None:
    """JAX reads this when it starts. It would otherwise take 75 % of a GPU's memory."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
