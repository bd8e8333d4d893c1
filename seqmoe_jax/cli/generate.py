"""`seqmoe generate`: streams text, then a line of statistics."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from seqmoe_jax.cli.arguments import (
    add_json,
    add_load_arguments,
    add_options,
    add_sampling_arguments,
    generate_options,
    load_engine,
    progress_of,
)
from seqmoe_jax.cli.terminal import text
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.options import GenerateOptions

if TYPE_CHECKING:
    from seqmoe_jax.stats import Stats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_load_arguments(parser)
    add(
        "--prompt",
        action="append",
        type=text,
        required=True,
        help="text to continue; give it again for a batch of up to 8",
    )
    add("--chat", action="store_true", help="prompts are a user's messages, to be answered by the chat template")
    add("--system", type=text, metavar="TEXT", help="with --chat: the system message before them")
    add("--chat-option", action="append", default=[], type=_chat_option, metavar="NAME=VALUE",
        help="with --chat: an option of the template, such as enable_thinking=false; may be repeated")  # fmt: skip
    add_options(parser, GenerateOptions, ["max_new_tokens"])
    add_options(parser, GenerateOptions, ["stop"], default=[], help="end before this text; may be repeated")
    add_sampling_arguments(parser)
    add_json(parser, "one JSON object (a list for a batch) instead of streamed text")


def run(args: argparse.Namespace) -> int:
    if not args.chat and (args.system is not None or args.chat_option):
        raise ConfigError("--system and --chat-option are for --chat: add it, or leave them out")
    options = generate_options(args, chat_options=dict(args.chat_option))
    engine = load_engine(args, max_batch=len(args.prompt), progress=progress_of(args))
    prompts, inputs = args.prompt, dict(prompt=args.prompt)
    if args.chat:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        inputs = dict(messages=[[*system, {"role": "user", "content": prompt}] for prompt in prompts])
        prompts = [""] * len(prompts)  # an answer stands for itself; a continuation is shown after its prompt
    if len(prompts) == 1 and not args.json:
        shown = prompts[0]  # goes out with the first piece: compilation is announced before that
        for piece in engine.stream(**{name: given[0] for name, given in inputs.items()}, **vars(options)):
            print(shown + piece, end="", flush=True)
            shown = ""
        print(shown)
    else:
        results = engine.generate(**inputs, **vars(options))
        if args.json:
            described = [vars(result) | {"stats": result.stats.as_dict()} for result in results]
            print(json.dumps(described[0] if len(described) == 1 else described))
        else:
            for prompt, result in zip(prompts, results, strict=True):
                print(prompt + result.text, end="\n\n")
    if not args.json:
        print(summary(engine.stats), file=sys.stderr)
    return 0


def _chat_option(word: str) -> tuple[str, Any]:
    """`NAME=VALUE`; a value that is JSON (a number, true, ...) is that, any other is text."""
    name, equals, value = text(word).partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {word!r}")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def summary(stats: Stats) -> str:
    """The one line after a generation."""
    by = "" if stats.forecast == "none" else f" (forecast: {stats.forecast})"
    return (
        f"seqmoe: {stats.new_tokens} tokens, {stats.tokens_per_second:.1f} tok/s, first after {stats.ttft_s:.2f} s; "
        f"policy {stats.policy}{by}, {stats.slots} slots (residency {stats.residency:.2f}), "
        f"hit rate {stats.hit_rate:.3f}, "
        f"{stats.experts_loaded} experts loaded ({stats.bytes_moved / 1e6:.1f} MB); "
        f"{stats.backend}, kernels {stats.kernels}"
    )
