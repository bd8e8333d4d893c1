"""`seqmoe serve`: an OpenAI-compatible HTTP server, until Ctrl-C."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from seqmoe_jax.cli.arguments import add_load_arguments, add_options, generate_options, load_engine
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.options import GenerateOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser, batch=True)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine alone)")
    add("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    unsaid = "where a request says nothing: the model's generation_config.json (default), or greedy"
    add_options(parser, GenerateOptions, ["sampling"], default="model", help=unsaid)


def run(args: argparse.Namespace) -> int:
    try:
        from seqmoe_jax.serving.server import Server, Service, bind
    except ModuleNotFoundError as error:
        raise ConfigError(f"serving needs the package {error.name}: pip install 'seqmoe-jax[serve]'") from None
    with bind(args.host, args.port) as listening:  # a port that is taken shows before a model is loaded
        engine = load_engine(args, progress=True)
        name = Path(args.model).resolve().name if Path(args.model).is_dir() else args.model
        service = Service(engine, name=name, sampling=generate_options(args).sampling_over(engine.defaults))
        host, port = listening.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        print(f"seqmoe: {name} at http://{address}:{port}/v1 (Ctrl-C ends it)", file=sys.stderr, flush=True)
        try:
            Server(service).run(sockets=[listening])
        except KeyboardInterrupt:  # raised again once everything has ended
            pass
        finally:
            service.scheduler.close()
    print("seqmoe: ended", file=sys.stderr)
    return 0
