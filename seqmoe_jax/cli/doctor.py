"""`seqmoe doctor`."""

from __future__ import annotations

import argparse
import json

from seqmoe_jax.cli.arguments import add_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from seqmoe_jax.doctor import describe, examine

    report = examine()
    print(json.dumps(report) if args.json else describe(report))
    return 0
