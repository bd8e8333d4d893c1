"""`seqmoe serve`: an OpenAI-compatible HTTP server, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path

from seqmoe_jax.cli.arguments import add_load_arguments, add_options, generate_options, load_engine
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.options import GenerateOptions

KEY_VARIABLE = "SEQMOE_API_KEY"
LAST_STEP = 5.0  # seconds for the step that runs to end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser, batch=True)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine alone)")
    add("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    names = (
        "name that requests may ask for as their host, besides localhost; several times for several, '*' for any "
        "(default: any, but on this machine's own address none, lest a web page reads answers)"
    )
    add("--allow-host", action="append", default=[], metavar="NAME", help=names)
    add(
        "--alias",
        action="append",
        default=[],
        metavar="NAME",
        help="another name of the model; several times for several",
    )
    key = (
        "what requests must have in the header Authorization: Bearer KEY; other users of this machine may see "
        f"arguments, so better in the environment variable {KEY_VARIABLE} (default: that, or none)"
    )
    add("--api-key", metavar="KEY", help=key)
    origin = "web pages of this origin may read answers, '*': any; several times for several (default: none)"
    add("--cors", action="append", default=[], metavar="ORIGIN", help=origin)
    drain = "for how many seconds SIGTERM lets answers end that have begun, while new requests get a 503 (default: 30)"
    add("--drain-seconds", type=float, default=30.0, metavar="SECONDS", help=drain)
    at_once = "answer at once, and let requests wait for the compiler (default: all is compiled at the start)"
    add("--no-warm-up", dest="warm_up", action="store_false", help=at_once)
    unsaid = "where a request says nothing: the model's generation_config.json (default), or greedy"
    add_options(parser, GenerateOptions, ["sampling"], default="model", help=unsaid)


def run(args: argparse.Namespace) -> int:
    try:
        from seqmoe_jax.serving.access import Access
        from seqmoe_jax.serving.hosts import answered_hosts
        from seqmoe_jax.serving.listener import Server, bind
        from seqmoe_jax.serving.server import Service
    except ModuleNotFoundError as error:
        raise ConfigError(f"serving needs the package {error.name}: pip install 'seqmoe-jax[serve]'") from None
    if not 0 <= args.drain_seconds <= 86_400:
        raise ConfigError(f"--drain-seconds must be from 0 to 86400, got {args.drain_seconds}")
    key = os.environ.get(KEY_VARIABLE) if args.api_key is None else args.api_key
    Access(key=key, origins=args.cors)  # a fault shows before a model is loaded
    with bind(args.host, args.port) as listening:  # a port that is taken shows before a model is loaded
        engine = load_engine(args, progress=True, warm_up=args.warm_up)
        name = Path(args.model).resolve().name if Path(args.model).is_dir() else args.model
        host, port = listening.getsockname()[:2]
        sampling = generate_options(args).sampling_over(engine.defaults)
        access = Access(hosts=answered_hosts(host, args.allow_host), key=key, origins=args.cors)
        service = Service(engine, name=name, sampling=sampling, aliases=args.alias, access=access)
        address = f"[{host}]" if ":" in host else host
        print(f"seqmoe: {name} at http://{address}:{port}/v1 (Ctrl-C ends it)", file=sys.stderr, flush=True)
        server = Server(service, drain=args.drain_seconds)
        server.run(sockets=[listening])
    ended = False
    with suppress(KeyboardInterrupt):  # once more
        ended = service.scheduler.join(0 if server.force_exit else LAST_STEP)
    if ended:
        engine.close()
    print("seqmoe: ended", file=sys.stderr, flush=True)
    if not ended:  # it compiles, which nothing can interrupt and Python would wait for
        os._exit(0)
    return 0
