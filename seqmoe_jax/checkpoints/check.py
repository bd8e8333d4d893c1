"""Compares what a model calls for with what a checkpoint has, before any weight is read."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterable, Mapping

from seqmoe_jax.checkpoints.fp8 import FP8
from seqmoe_jax.checkpoints.safetensors import Checkpoint
from seqmoe_jax.checkpoints.scales import DTYPES, scales_name, scales_of
from seqmoe_jax.checkpoints.sources import NameMap
from seqmoe_jax.errors import CheckpointError

log = logging.getLogger("seqmoe_jax")

FLOATS = ("float32", "bfloat16", "float16", "float64", FP8.name)
INTEGERS = ("int64", "int32")
PACKED = ("uint8", "int8", "float8_e8m0fnu")  # names under which checkpoints store bytes
# Scales of what servers quantise as they go.
ACTIVATIONS = (
    "*input_scale",
    "*activation_scale",
    "*input_scale_ub",
    "*output_scale",
    "*[._][qkv]_scale",
    "*.kv_scale",
)
# What stands beside weights of formats that are not read, and what these are.
UNREAD = {
    "*.qweight": "packed integers (GPTQ or AWQ)",
    "*.weight_packed": "packed integers of compressed-tensors",
    "*.SCB": "int8 weights of bitsandbytes",
    "*.absmax": "4-bit weights of bitsandbytes",
    "*.weight_scale_2": "4-bit floats (NVFP4)",
}


def check_names(checkpoint: Checkpoint, names: NameMap) -> None:
    """Raises `CheckpointError` with counts and first names of what is missing, wrong or unexpected."""
    wanted: dict[str, tuple[int, ...]] = {}
    missing: list[str] = []
    wrong: list[str] = []

    def see(name: str, shape: tuple[int, ...], allowed: tuple[str, ...]) -> None:
        if name in wanted:
            return
        wanted[name] = shape
        if name not in checkpoint.names:
            missing.append(name)
            return
        info = checkpoint.info(name)
        if info.shape != shape:
            wrong.append(f"{name} {list(info.shape)} for {list(shape)}")
        elif info.dtype.name not in allowed:
            wrong.append(f"{name} of {info.dtype}")

    for source in names.sources():
        see(source.tensor, source.shape, PACKED if source.packed else INTEGERS if source.integers else FLOATS)
        if source.tensor in checkpoint.names and checkpoint.info(source.tensor).dtype == FP8:
            if scales_name(checkpoint, source.tensor) is None:
                missing.append(f"{source.tensor}_scale or _scale_inv")
            else:
                scales = scales_of(checkpoint, names, source).source
                see(scales.tensor, scales.shape, DTYPES)
    unused = [name for name in checkpoint.names if name not in wanted]
    activations = _matching(unused, ACTIVATIONS)
    left = _matching(unused, names.ignored)
    extra = sorted(set(unused).difference(*left.values(), *activations.values()))
    found = [(missing, "missing"), (wrong, "of a wrong shape or dtype"), (extra, "unexpected")]
    faults = [f"{len(which)} {what} ({_first(which)})" for which, what in found if which]
    if faults:
        kinds = [what for pattern, what in UNREAD.items() if fnmatch.filter(unused, pattern)]
        kinds += ["int8 weights with scales"] if any(name.endswith(" of int8") for name in wrong) else []
        advice = f"{kinds[0]} are not supported" if kinds else "do config.json and weights belong together?"
        raise CheckpointError(
            f"{checkpoint.directory}: expected the {len(wanted)} tensors that config.json calls for, got "
            f"{', '.join(faults)}; {advice}"
        )
    skipped = [f"{pattern} ({len(which)} tensors)" for pattern, which in left.items() if which]
    if skipped:
        log.info("%s: left out %s, of no use to the text model", checkpoint.directory, ", ".join(skipped))
    if names.activations or any(activations.values()):
        count = sum(map(len, activations.values()))
        log.warning(
            "%s: weights are FP8, activations are not quantised%s",
            checkpoint.directory,
            f": {count} scales of activations are not applied" if count else ", as its config asks servers to",
        )


def _matching(names: list[str], patterns: Iterable[str]) -> Mapping[str, list[str]]:
    return {pattern: fnmatch.filter(names, pattern) for pattern in patterns}


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
