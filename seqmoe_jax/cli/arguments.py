"""Options that several commands share, and what they make of them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seqmoe_jax.api import Engine


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


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--residency", type=_residency, metavar="R", help="share of experts with a slot, or 'least'")
    size.add_argument("--device-memory", metavar="SIZE", help="budget instead of a residency, such as 12GiB")


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """What every command has that loads a model, as `load_engine` reads it."""
    add = parser.add_argument
    add("model", nargs="?", default="demo", help="directory, Hugging Face id, 'demo' (default), or a preset")
    add_size_arguments(parser)
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


def _residency(text: str) -> float | str:
    if text == "least":
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number in (0, 1] or 'least', got {text!r}") from None
