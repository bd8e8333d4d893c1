"""`seqmoe plan`: exit status 1 says that the model does not fit."""

from __future__ import annotations

import argparse
import json

from seqmoe_jax.cli.arguments import MODEL, add_json, add_options, engine_options
from seqmoe_jax.options import EngineOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="demo", help=MODEL)
    add_options(parser, EngineOptions, ["residency", "device_memory", "context", "dtype", "kernels"])
    add_options(parser, EngineOptions, ["max_batch"], flag="--batch")
    add_json(parser, "machine-readable output, sizes in bytes")


def run(args: argparse.Namespace) -> int:
    from seqmoe_jax.memory.report import describe, size_up

    report = size_up(args.model, EngineOptions(**engine_options(args)))
    print(json.dumps(report) if args.json else describe(report))
    return 0 if report["fits"] else 1
