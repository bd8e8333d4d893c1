"""`seqmoe trace`: records the expert activations of a model on prompts."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from seqmoe_jax.cli.arguments import (
    add_force,
    add_json,
    add_load_arguments,
    add_sampling_arguments,
    batch,
    generate_options,
    integer_from,
    load_engine,
    output,
    progress_of,
)
from seqmoe_jax.cli.terminal import text

if TYPE_CHECKING:
    from seqmoe_jax.api import Engine
    from seqmoe_jax.traces.format import Trace
    from seqmoe_jax.traces.prompts import Prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recording_arguments(parser)
    parser.add_argument(
        "--out", type=output, required=True, metavar="T.npz", help="what is done so far is kept in T.npz.parts"
    )
    add_force(parser)
    add_json(parser)


def add_recording_arguments(parser: argparse.ArgumentParser) -> None:
    """What is recorded and how: all but where it goes."""
    add_load_arguments(parser)
    add_sampling_arguments(parser)
    add = parser.add_argument
    add("--prompts", required=True, metavar="FILE", help="one per line; or .jsonl of objects with 'prompt' and, "
        "if wanted, 'split' and 'temperature'")  # fmt: skip
    add("--chat", action="store_true", help="prompts are a user's messages, to be answered by the chat template")
    add("--max-new-tokens", type=integer_from(2), default=256, metavar="N", help="per prompt, at most (default: 256)")
    add("--batch", type=batch, default=8, metavar="B", help="sequences decoded together, 1 to 8 (default: 8)")
    add(
        "--name",
        type=text,
        metavar="ID",
        help="what the trace calls the model (default: MODEL, of a path its last part)",
    )


def run(args: argparse.Namespace) -> int:
    """Reads the prompts, loads the model, records; prints one line or one JSON object."""
    from seqmoe_jax.traces.prompts import read_prompts
    from seqmoe_jax.traces.record import check_output

    check_output(args.out, force=args.force)
    generate_options(args)  # faults in them
    prompts = read_prompts(args.prompts)
    engine = load_engine(args, max_batch=args.batch, progress=progress_of(args))
    begun = time.perf_counter()
    trace = recorded(engine, args, prompts, args.out)
    decoded = int(trace.decoded().sum())
    said = {
        "trace": str(args.out),
        "model": trace.model,
        "sequences": trace.sequences,
        "left_out": len(prompts) - trace.sequences,
        "prompt_steps": trace.steps - decoded,
        "decode_steps": decoded,
        **trace.sizes,
        "seconds": round(time.perf_counter() - begun, 1),
    }
    if args.json:
        print(json.dumps(said))
    else:
        print(
            f"{args.out}: {trace.sequences} sequences of {trace.model}, {decoded} decode steps after "
            f"{trace.steps - decoded} of prompts, in {said['seconds']} s"
        )
    return 0


def recorded(engine: Engine, args: argparse.Namespace, prompts: Sequence[Prompt], out: Path) -> Trace:
    """The trace of the prompts, recorded as the arguments say, with a progress bar on a terminal."""
    from seqmoe_jax.traces.record import Recording, progress_bar, record

    sampling = generate_options(args).sampling_over(engine.defaults)
    recording = Recording(max_new_tokens=args.max_new_tokens, sampling=sampling, eos_token_ids=engine.eos_token_ids)
    encoded = encode(engine, prompts, chat=args.chat)
    model, quiet = model_name(args), args.json or not sys.stderr.isatty()
    with progress_bar(len(prompts), not quiet) as progress:
        return record(
            engine.token_engine, prompts, encoded, recording, out, model=model, force=args.force, progress=progress
        )


def encode(engine: Engine, prompts: Sequence[Prompt], *, chat: bool) -> list[list[int]]:
    """The prompts' tokens: as text to continue, or with `chat` as a user's messages to answer."""
    inputs = [
        {"messages": [{"role": "user", "content": prompt.text}]} if chat else {"prompt": prompt.text}
        for prompt in prompts
    ]
    return [engine.request(**given, index=index).tokens for index, given in enumerate(inputs)]


def model_name(args: argparse.Namespace) -> str:
    """What the trace calls its model: no directory of this machine."""
    return str(args.name or (Path(args.model).resolve().name if Path(args.model).exists() else args.model))
