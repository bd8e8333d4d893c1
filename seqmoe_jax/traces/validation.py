"""What must hold of the arrays of a trace file (`format` says what they mean)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int32, Integer

from seqmoe_jax.errors import TraceError

REQUIRED = ("ids", "probs_u8", "tok", "lens", "seq_offsets", "num_experts", "layer_index")
MOST_KEYS = 1 << 18  # L * E: ten times what the largest published models have
OPTIONAL = ("vocab_size", "split", "prefill_lens")


def check_headers(arrays: Mapping[str, Any]) -> None:
    """`TraceError` for the first thing that is wrong with what is there, its dtypes and shapes."""
    missing = [name for name in REQUIRED if name not in arrays]
    if missing:
        raise TraceError(f"missing {', '.join(missing)}: a trace has {', '.join(REQUIRED)}")
    _check_dtypes(arrays)
    _check_shapes(arrays)


def check_arrays(arrays: Mapping[str, Any]) -> None:
    """`TraceError` for the first value that is wrong, where `check_headers` found nothing."""
    _check_sequences(arrays)
    _check_layers(arrays["layer_index"], int(arrays["num_experts"]))
    _check_ids(arrays["ids"], int(arrays["num_experts"]))
    _check_tokens(arrays["tok"], int(arrays["vocab_size"]) if "vocab_size" in arrays else None)


def _check_dtypes(arrays: Mapping[str, Any]) -> None:
    exact = {"ids": (np.uint8, np.uint16), "probs_u8": (np.uint8,), "tok": (np.int32,)}
    for name, dtypes in exact.items():
        if arrays[name].dtype not in dtypes:
            expected = " or ".join(np.dtype(dtype).name for dtype in dtypes)
            raise TraceError(f"{name} has dtype {arrays[name].dtype}, expected {expected}")
    for name in ("lens", "seq_offsets", "num_experts", "layer_index", "vocab_size", "prefill_lens"):
        if name in arrays and arrays[name].dtype.kind not in "iu":
            raise TraceError(f"{name} has dtype {arrays[name].dtype}, expected an integer type")
    for name in ("split", "model"):
        if name in arrays and arrays[name].dtype.kind != "U":
            raise TraceError(f"{name} has dtype {arrays[name].dtype}, expected strings")


def _check_shapes(arrays: Mapping[str, Any]) -> None:
    ids = arrays["ids"]
    if ids.ndim != 3:
        raise TraceError(f"ids has shape {ids.shape}, expected (steps, layers, active experts)")
    if 0 in ids.shape:
        raise TraceError(f"the trace is empty: ids has shape {ids.shape}")
    if arrays["lens"].ndim != 1:
        raise TraceError(f"lens has shape {arrays['lens'].shape}, expected one length per sequence")
    sequences = arrays["lens"].shape[0]
    shapes: dict[str, tuple[int, ...]] = {
        "probs_u8": ids.shape,
        "tok": ids.shape[:1],
        "layer_index": ids.shape[1:2],
        "seq_offsets": (sequences + 1,),
        "num_experts": (),
        "vocab_size": (),
        "split": (sequences,),
        "model": (),
        "prefill_lens": (sequences,),
    }
    for name, shape in shapes.items():
        if name in arrays and arrays[name].shape != shape:
            raise TraceError(f"{name} has shape {arrays[name].shape}, expected {shape}")


def _check_sequences(arrays: Mapping[str, Any]) -> None:
    steps, lens, offsets = arrays["ids"].shape[0], arrays["lens"], arrays["seq_offsets"]
    if not lens.size or lens.min() < 1:
        raise TraceError("every sequence needs at least one step: lens has an entry below 1 or none at all")
    if offsets[0] != 0 or offsets[-1] != steps:
        raise TraceError(
            f"seq_offsets runs from {offsets[0]} to {offsets[-1]}, expected 0 to {steps} (the steps of ids)"
        )
    wrong = np.flatnonzero(np.diff(offsets.astype(np.int64)) != lens)
    if wrong.size:
        i = wrong[0]
        raise TraceError(
            f"sequence {i} spans {int(offsets[i + 1]) - int(offsets[i])} steps in seq_offsets but {lens[i]} in lens"
        )
    if "prefill_lens" in arrays and ((arrays["prefill_lens"] < 0) | (arrays["prefill_lens"] > lens)).any():
        raise TraceError("prefill_lens has an entry below 0 or above the length of its sequence")


def _check_layers(index: Integer[np.ndarray, " L"], experts: int) -> None:
    if index.min() < 0 or index.max() >= MOST_KEYS:
        raise TraceError(f"layer_index runs from {index.min()} to {index.max()}, expected layers of a model")
    if index.size * experts > MOST_KEYS:
        raise TraceError(f"expected at most {MOST_KEYS} experts in all layers, got {index.size} times {experts}")


def _check_ids(ids: Integer[np.ndarray, "T L K"], experts: int) -> None:
    if experts < 1 or ids.shape[2] > experts:
        raise TraceError(f"num_experts is {experts}, expected at least the {ids.shape[2]} active ones of ids")
    if int(ids.max()) >= experts:
        step, layer, _ = np.unravel_index(int(ids.argmax()), ids.shape)
        raise TraceError(
            f"expert id {ids.max()} at step {step}, layer {layer} is out of range: expected 0 to {experts - 1}"
        )
    # In blocks, so that the sorted copy of a long trace stays small.
    for start in range(0, ids.shape[0], 65536):
        ordered = np.sort(ids[start : start + 65536], axis=2)
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=2)
        if twice.any():
            step, layer = np.argwhere(twice)[0]
            raise TraceError(f"an expert appears twice at step {start + step}, layer {layer}")


def _check_tokens(tokens: Int32[np.ndarray, " T"], vocabulary: int | None) -> None:
    if tokens.min() < 0:
        raise TraceError(f"token id {tokens.min()} is negative")
    if vocabulary is not None and tokens.max() >= vocabulary:
        raise TraceError(f"token id {tokens.max()} is out of range: vocab_size is {vocabulary}")
