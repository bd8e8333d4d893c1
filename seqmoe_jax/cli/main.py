"""The `seqmoe` command. Every fault of input is one line on standard error and exit status 2."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from seqmoe_jax.cli import bench as benchmark
from seqmoe_jax.errors import ConfigError, SeqMoEError
from seqmoe_jax.host_memory import host_memory_bytes

if TYPE_CHECKING:
    from seqmoe_jax.api import Engine
    from seqmoe_jax.stats import Stats


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="seqmoe", description="Mixture-of-Experts models with most experts outside device memory, exactly."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands.add_parser("generate", help="generate text"))
    _add_serve(commands.add_parser("serve", help="an OpenAI-compatible HTTP server"))
    _add_plan(commands.add_parser("plan", help="will a model fit, at which residency, what it needs"))
    _add_trace_commands(commands)
    bench = commands.add_parser("bench", help="measured speed and where the time goes, with routing from a trace")
    benchmark.add_arguments(bench)
    bench.set_defaults(run=benchmark.run)
    doctor = commands.add_parser("doctor", help="what this machine has: backend, memories, link bandwidth, kernels")
    doctor.add_argument("--json", action="store_true", help="machine-readable output")
    doctor.set_defaults(run=_doctor)
    return parser


def _add_trace_commands(commands: argparse._SubParsersAction) -> None:
    """What records traces and what works on them; each command's module says which options it has."""
    from seqmoe_jax import plots
    from seqmoe_jax.cli import predictor as forecast
    from seqmoe_jax.cli import trace as traces

    trace = commands.add_parser("trace", help="record the expert activations of a model on prompts")
    add_load_arguments(trace)
    add_sampling_arguments(trace)
    traces.add_record_arguments(trace)
    trace.set_defaults(run=_trace)
    simulate = commands.add_parser("simulate", help="hit rate, transfers and share of full load, from a trace")
    traces.add_arguments(simulate)
    simulate.set_defaults(run=traces.run)
    train = commands.add_parser("train-predictor", help="train a predictor of expert activations on a trace")
    forecast.add_train_arguments(train)
    train.set_defaults(run=forecast.train)
    evaluate = commands.add_parser("evaluate", help="recall of a predictor beside the baselines, on a trace")
    forecast.add_evaluate_arguments(evaluate)
    evaluate.set_defaults(run=forecast.evaluate)
    plot = commands.add_parser("plot", help="recall, hit rate or activations as an image")
    plots.add_arguments(plot)
    plot.set_defaults(run=plots.run)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_generate)
    add = parser.add_argument
    add_load_arguments(parser)
    add("--prompt", action="append", required=True, help="text to continue; give it again for a batch of up to 8")
    add("--chat", action="store_true", help="prompts are a user's messages, to be answered by the chat template")
    add("--system", metavar="TEXT", help="with --chat: the system message before them")
    add("--chat-option", action="append", default=[], type=_option, metavar="NAME=VALUE",
        help="with --chat: an option of the template, such as enable_thinking=false; may be repeated")  # fmt: skip
    add("--max-new-tokens", type=int, default=128, metavar="N")
    add_sampling_arguments(parser)
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add("--json", action="store_true", help="one JSON object (a list for a batch) instead of streamed text")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How tokens are drawn, as `sampling_numbers` reads it."""
    add = parser.add_argument
    add("--sampling", choices=["greedy", "model"], default="greedy",
        help="what the next five override: greedy (default), or the model's generation_config.json")  # fmt: skip
    add("--temperature", type=float, help="0 is greedy")
    add("--top-k", type=int)
    add("--top-p", type=float)
    add("--min-p", type=float)
    add("--seed", type=int)


def sampling_numbers(args: argparse.Namespace) -> dict[str, float | int | None]:
    """The options that override. A fault in them shows here, before a model is loaded."""
    from seqmoe_jax.sampling import SamplingConfig

    numbers = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
    SamplingConfig().override(**numbers)
    return numbers


def _add_serve(parser: argparse.ArgumentParser) -> None:
    from seqmoe_jax.cli import serve as command

    add_load_arguments(parser)
    command.add_arguments(parser)
    parser.set_defaults(run=command.run)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_plan)
    add = parser.add_argument
    add("model", nargs="?", default="demo", help="directory, Hugging Face id, 'demo' (default), or a preset")
    _add_size(parser)
    add("--context", type=int, metavar="N", help="longest prompt + new tokens (default: 4096, at most the model's)")
    add("--batch", type=int, default=1, metavar="B", help="sequences decoded together, 1 (default) to 8")
    add("--dtype", help="of activations: float32 or bfloat16")
    add("--kernels", choices=["xla", "gpu", "tpu"], help="default: the best this backend has")
    add("--json", action="store_true", help="machine-readable output, sizes in bytes")


def _add_size(parser: argparse.ArgumentParser) -> None:
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--residency", type=_residency, metavar="R", help="share of experts with a slot, or 'least'")
    size.add_argument("--device-memory", metavar="SIZE", help="budget instead of a residency, such as 12GiB")


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """What every command has that loads a model, as `load_engine` reads it."""
    add = parser.add_argument
    add("model", nargs="?", default="demo", help="directory, Hugging Face id, 'demo' (default), or a preset")
    _add_size(parser)
    add("--policy", default="seqmoe", help="seqmoe (default), lru, lfu, prefill-hot or full")
    add("--predictor", default="auto", metavar="auto|DIR|none", help="what policy seqmoe forecasts by (default: auto)")
    add("--transfers", default="auto", metavar="ENGINE", help="auto (default), none, device_put, callback or dma")
    add("--context", type=int, metavar="N", help="longest prompt + new tokens (default: 4096, at most the model's)")
    add("--dtype", help="of activations: float32 or bfloat16")
    add("--kernels", choices=["xla", "gpu", "tpu"], help="default: the best this backend has")
    add("--random-weights", action="store_true", help="MODEL is a preset of configs/")


def load_engine(args: argparse.Namespace, *, max_batch: int, progress: bool | None) -> Engine:
    from seqmoe_jax.api import load

    return load(
        args.model,
        residency=args.residency,
        device_memory=args.device_memory,
        policy=args.policy,
        predictor=args.predictor,
        transfers=args.transfers,
        max_batch=max_batch,
        context=args.context,
        dtype=args.dtype,
        random_weights=args.random_weights,
        kernels=args.kernels,
        progress=progress,
    )


def _option(text: str) -> tuple[str, Any]:
    """`NAME=VALUE`; a value that is JSON (a number, true, ...) is that, any other is text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _residency(text: str) -> float | str:
    if text == "least":
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number in (0, 1] or 'least', got {text!r}") from None


def _generate(args: argparse.Namespace) -> int:
    from seqmoe_jax.api import sampling_base

    numbers = sampling_numbers(args)
    if args.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}")
    if not args.chat and (args.system is not None or args.chat_option):
        raise ConfigError("--system and --chat-option are for --chat: add it, or leave them out")
    progress = True if sys.stderr.isatty() or not args.json else None
    engine = load_engine(args, max_batch=len(args.prompt), progress=progress)
    sampling = sampling_base(args.sampling, engine.defaults).override(**numbers)
    options: dict[str, Any] = dict(max_new_tokens=args.max_new_tokens, sampling=sampling, stop=args.stop)
    prompts, inputs = args.prompt, dict(prompt=args.prompt)
    if args.chat:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        inputs = dict(messages=[[*system, {"role": "user", "content": prompt}] for prompt in prompts])
        options["chat_options"] = dict(args.chat_option)
        prompts = [""] * len(prompts)  # an answer stands for itself; a continuation is shown after its prompt
    if len(prompts) == 1 and not args.json:
        shown = prompts[0]  # goes out with the first piece: compilation is announced before that
        for piece in engine.stream(**{name: given[0] for name, given in inputs.items()}, **options):
            print(shown + piece, end="", flush=True)
            shown = ""
        print(shown)
    else:
        results = engine.generate(**inputs, **options)
        if args.json:
            described = [
                {"text": r.text, "reasoning": r.reasoning, "tokens": r.tokens, "finish_reason": r.finish_reason,
                 "stats": r.stats.as_dict()}
                for r in results
            ]  # fmt: skip
            print(json.dumps(described[0] if len(described) == 1 else described))
        else:
            for prompt, result in zip(prompts, results, strict=True):
                print(prompt + result.text, end="\n\n")
    if not args.json:
        print(summary(engine.stats), file=sys.stderr)
    return 0


def _plan(args: argparse.Namespace) -> int:
    """Exit status 1 says that the model does not fit."""
    from seqmoe_jax.memory.plan import parse_bytes
    from seqmoe_jax.memory.report import describe, size_up

    report = size_up(
        args.model,
        residency=args.residency,
        device_memory=None if args.device_memory is None else parse_bytes(args.device_memory),
        context=args.context,
        batch=args.batch,
        dtype=args.dtype,
        kernels=args.kernels,
    )
    print(json.dumps(report) if args.json else describe(report))
    return 0 if report["fits"] else 1


def _trace(args: argparse.Namespace) -> int:
    from seqmoe_jax.api import sampling_base
    from seqmoe_jax.cli.trace import record

    numbers = sampling_numbers(args)
    progress = True if sys.stderr.isatty() or not args.json else None
    return record(
        args,
        load=lambda: load_engine(args, max_batch=args.batch, progress=progress),
        sampling=lambda engine: sampling_base(args.sampling, engine.defaults).override(**numbers),
    )


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


def _doctor(args: argparse.Namespace) -> int:
    from seqmoe_jax.doctor import describe, examine

    report = examine()
    print(json.dumps(report) if args.json else describe(report))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status: 0, 1 for what does not fit, 2 for bad input, 130 for an interrupt."""
    args = build_parser().parse_args(argv)
    # Read when JAX starts. It would otherwise take 75 % of a GPU's memory at most, and pin 64 GB of the host's.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(max(64, host_memory_bytes() >> 30)))
    try:
        return args.run(args)
    except SeqMoEError as error:
        print(f"seqmoe: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nseqmoe: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
