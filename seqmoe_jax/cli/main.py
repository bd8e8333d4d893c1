"""The `seqmoe` command. Every fault of input is one line on standard error and exit status 2."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from seqmoe_jax import __version__
from seqmoe_jax.cli.terminal import BROKEN_PIPE, flushed, open_streams
from seqmoe_jax.errors import ConfigError, SeqMoEError, one_line, was_interrupt


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
    Command("learn", "a predictor of one's own for a model, from prompts to where it is found", "cli.learn"),
    Command("trace", "record the expert activations of a model on prompts", "cli.trace"),
    Command("import-trace", "a trace from what vLLM's server says of its routing", "cli.import_trace"),
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

    command: Parser | None = None  # that of the command that is used, where this is the parser of all
    given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.given = args or ()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        command = self.command or self
        known = list(command._option_string_actions)
        words = [word.split("=")[0] for word in command.given if word.startswith("--") and word != "--"]
        unknown = [word for word in words if not any(option.startswith(word) for option in known)]
        if unknown:  # before what is missing because of it
            close = difflib.get_close_matches(unknown[0], known, n=2)
            message = f"unknown option {unknown[0]}" + (f"; did you mean {' or '.join(close)}?" if close else "")
        elif message.endswith("expected one argument"):
            message += " (a text that begins with - is written --option=-TEXT)"
        raise ConfigError(f"{message} (see {command.prog} --help)")


def build_parser(used: str | None = None) -> Parser:
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
            parser.command = each
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
    except Exception as error:
        if was_interrupt(error):
            return _say("interrupted", 130)
        if not _is_of_devices(error):
            raise
        asked = os.environ.get("JAX_PLATFORMS", "")
        return _say(
            f"JAX finds no device (JAX_PLATFORMS is {asked!r}): {one_line(str(error)) or 'is it installed?'}", 2
        )


def run_process() -> NoReturn:
    """Runs the command that the process was started for, and ends the process.

    After a fault or an interrupt at once: threads of JAX may still be at work, and would abort where Python ends below
    them. Nothing is lost by that, since everything that is to be cleaned up is so on the way here.
    """
    status = main()
    if status:
        os._exit(status)
    sys.exit(0)


def _run(words: Sequence[str]) -> int:
    parser = build_parser(words[0] if words else None)
    args = parser.parse_args(words)
    if args.run is None:
        parser.print_help()
        return 0
    _let_jax_use_memory()
    return int(args.run(args))


def _is_of_devices(error: BaseException) -> bool:
    """Whether JAX raised it when it looked for devices."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return frames[-1][0].f_code.co_filename.endswith("xla_bridge.py")


def _say(what: str, status: int) -> int:
    with suppress(OSError):  # there may be nobody to say it to
        after = "\n" if status == 130 and sys.stderr.isatty() else ""  # ^C, or a progress bar
        print(f"{after}seqmoe: {what}", file=sys.stderr, flush=True)
    return status


def _let_jax_use_memory() -> None:
    """JAX reads this when it starts. It would otherwise take 75 % of a GPU's memory."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
