"""`seqmoe import-trace`: a trace from answers of vLLM's server that say where every token was routed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from seqmoe_jax.cli.arguments import add_force, add_json, integer_from, output
from seqmoe_jax.cli.terminal import text
from seqmoe_jax.outputs.runs import check_replaced, to_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("responses", metavar="FILE", help="a .jsonl of answers, asked for with return_token_ids, of a server with "
        "--enable-return-routed-experts")  # fmt: skip
    add("--experts", type=integer_from(1, 65536), required=True, metavar="E", help="experts of a layer")
    add("--model", type=text, required=True, metavar="ID", help="the model that answered")
    add("--out", type=output, required=True, metavar="T.npz")
    add_force(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    import dataclasses

    import numpy as np

    from seqmoe_jax.traces.format import read_run, write_trace
    from seqmoe_jax.traces.responses import read_responses

    check_replaced(args.out, "trace", read_run, force=args.force)
    trace = read_responses(args.responses, experts=args.experts, model=args.model)
    run = {"model": args.model, "imported": trace.digest}
    check_replaced(args.out, "trace", read_run, run, force=args.force)
    trace = dataclasses.replace(trace, metadata={**trace.metadata, "run": np.asarray(to_json(run))})
    write_trace(args.out, trace)
    decoded = int(trace.decoded().sum())
    said = {"trace": str(args.out), "model": args.model, "sequences": trace.sequences,
            "prompt_steps": trace.steps - decoded, "decode_steps": decoded, **trace.sizes}  # fmt: skip
    name = Path(args.responses).name
    print(
        json.dumps(said)
        if args.json
        else f"{args.out}: {trace.sequences} sequences of {args.model} from {name}, {decoded} decode steps after "
        f"{trace.steps - decoded} of prompts"
    )
    return 0
