"""The trace file: which experts every step of many sequences activated, as one `npz`.

A trace is a flat array of T steps; `seq_offsets` cuts it into N sequences. Field by field:

| name | dtype | shape | meaning |
|---|---|---|---|
| `ids` | uint8 or uint16 | T L K | activated experts, the heaviest first |
| `probs_u8` | uint8 | T L K | softmax over the K activated, times 255 |
| `tok` | int32 | T | the token that the step processed |
| `lens` | integer | N | steps per sequence |
| `seq_offsets` | integer | N+1 | where each sequence starts; the last is T |
| `num_experts` | integer | - | E |
| `layer_index` | integer | L | index in the model of each MoE layer |
| `vocab_size` | integer | - | optional: size of the tokenizer's vocabulary |
| `split` | string | N | optional: `train`, `test`, ... |
| `prefill_lens` | integer | N | optional: how many first steps of a sequence are its prompt (default 0) |

A prompt's tokens are steps like those decoded: the predictor reads both. What counts hits or recall counts decoded
steps alone.

Every other array is metadata. It is kept; one with N rows is taken to be per sequence.
"""

from __future__ import annotations

import itertools
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32, Integer, UInt8

from seqmoe_jax.errors import TraceError

_REQUIRED = ("ids", "probs_u8", "tok", "lens", "seq_offsets", "num_experts", "layer_index")
_OPTIONAL = ("vocab_size", "split", "prefill_lens")


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Expert activations of N sequences, T steps in all. Fields as in the module's table."""

    ids: Integer[np.ndarray, "T L K"]
    probs_u8: UInt8[np.ndarray, "T L K"]
    tok: Int32[np.ndarray, " T"]
    lens: Integer[np.ndarray, " N"]
    seq_offsets: Integer[np.ndarray, " N+1"]
    num_experts: int
    layer_index: Integer[np.ndarray, " L"]
    vocab_size: int | None = None
    split: np.ndarray | None = None
    prefill_lens: Integer[np.ndarray, " N"] | None = None
    metadata: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """T."""
        return self.ids.shape[0]

    @property
    def layers(self) -> int:
        """L."""
        return self.ids.shape[1]

    @property
    def active(self) -> int:
        """K."""
        return self.ids.shape[2]

    @property
    def sequences(self) -> int:
        """N."""
        return self.lens.shape[0]

    @property
    def sizes(self) -> dict[str, int]:
        """L, E and K as `layers`, `experts`, `active`."""
        return {"layers": self.layers, "experts": self.num_experts, "active": self.active}

    @property
    def model(self) -> str | None:
        """Which model it is of, where its metadata says."""
        return str(self.metadata["model"]) if "model" in self.metadata else None

    def first_steps(self) -> Bool[np.ndarray, " T"]:
        """True at the first step of every sequence."""
        first = np.zeros(self.steps, bool)
        first[self.seq_offsets[:-1]] = True
        return first

    def spans(self) -> list[tuple[int, int]]:
        """First and past-the-last step of every sequence."""
        ends = self.seq_offsets.tolist()
        return list(itertools.pairwise(ends))

    def activations(self, start: int = 0, stop: int | None = None) -> Bool[np.ndarray, "t L E"]:
        """Which experts the steps [start, stop) activated."""
        ids = self.ids[start:stop].astype(np.int64)
        active = np.zeros((*ids.shape[:2], self.num_experts), bool)
        np.put_along_axis(active, ids, True, axis=2)
        return active

    def select(self, split: str) -> Trace:
        """The sequences of one split, or `TraceError` naming the splits there are."""
        if self.split is None:
            raise TraceError(f"the trace has no splits, so there is no split {split!r}")
        chosen = np.flatnonzero(self.split == split)
        if not chosen.size:
            known = ", ".join(repr(str(name)) for name in np.unique(self.split))
            raise TraceError(f"the trace has no split {split!r}: expected one of {known}")
        return self.take(chosen)

    def take(self, sequences: Integer[np.ndarray, " n"]) -> Trace:
        """The sequences of these indices, in this order."""
        spans = self.spans()
        rows = [np.arange(*spans[i]) for i in sequences]
        steps = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        lens = self.lens[sequences]
        return replace(
            self,
            ids=self.ids[steps],
            probs_u8=self.probs_u8[steps],
            tok=self.tok[steps],
            lens=lens,
            seq_offsets=np.concatenate([[0], np.cumsum(lens, dtype=np.int64)]),
            split=None if self.split is None else self.split[sequences],
            prefill_lens=None if self.prefill_lens is None else self.prefill_lens[sequences],
            metadata={
                name: array[sequences] if array.shape[:1] == self.lens.shape else array
                for name, array in self.metadata.items()
            },
        )

    def decoded(self) -> Bool[np.ndarray, " T"]:
        """True at the steps that are not of a prompt."""
        prompts = np.zeros(self.sequences, np.int64) if self.prefill_lens is None else self.prefill_lens
        within = np.arange(self.steps) - np.repeat(self.seq_offsets[:-1], self.lens)
        return within >= np.repeat(prompts, self.lens)

    def without_prompts(self) -> Trace:
        """The decoded steps alone; sequences without any are left out."""
        if self.prefill_lens is None:
            return self
        kept, lens = self.decoded(), self.lens - self.prefill_lens
        trace = replace(
            self,
            ids=self.ids[kept],
            probs_u8=self.probs_u8[kept],
            tok=self.tok[kept],
            lens=lens,
            seq_offsets=np.concatenate([[0], np.cumsum(lens, dtype=np.int64)]),
            prefill_lens=None,
        )
        return trace.take(np.flatnonzero(lens))

    def popularity(self) -> Float32[np.ndarray, "L E"]:
        """Share of the prompts' tokens that activated each expert (of all steps, where there are no prompts).

        What a prefill that knows nothing of its prompt yet should have resident first (paper 8.4).
        """
        chosen = ~self.decoded()
        if not chosen.any():
            chosen[:] = True
        ids = self.ids[chosen].astype(np.int64) + np.arange(self.layers)[:, None] * self.num_experts
        counts = np.bincount(ids.reshape(-1), minlength=self.layers * self.num_experts)
        return (counts / chosen.sum()).astype(np.float32).reshape(self.layers, self.num_experts)

    def check_model(self, *, layers: int, experts: int, active: int, name: str = "the model") -> None:
        """`TraceError` unless the trace is of a model with these L, E and K."""
        theirs, ours = (layers, experts, active), (self.layers, self.num_experts, self.active)
        if theirs != ours:
            raise TraceError(
                f"the trace is of another model: {name} has (layers, experts, active experts) {theirs}, "
                f"the trace {ours}"
            )


def join(traces: Sequence[Trace]) -> Trace:
    """One trace of the sequences of several, which have the same fields and are of one model."""
    first = traces[0]
    optional = [name for name in ("split", "prefill_lens") if getattr(first, name) is not None]
    per_sequence = [name for name, array in first.metadata.items() if array.shape[:1] == first.lens.shape]
    whole: dict[str, Any] = {
        name: np.concatenate([getattr(trace, name) for trace in traces])
        for name in ("ids", "probs_u8", "tok", "lens", *optional)
    }
    return replace(
        first,
        **whole,
        seq_offsets=np.concatenate([[0], np.cumsum(whole["lens"], dtype=np.int64)]),
        metadata={**first.metadata}
        | {name: np.concatenate([trace.metadata[name] for trace in traces]) for name in per_sequence},
    )


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """A trace file, validated in full; `TraceError` in one line for anything wrong with it."""
    path = Path(path)
    if not path.is_file():
        raise TraceError(f"no trace file {path}")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, KeyError, AttributeError, zipfile.BadZipFile) as error:
        raise TraceError(f"{path} is not a readable npz file: {error}") from None
    try:
        return _from_arrays(arrays)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def write_trace(path: str | os.PathLike[str], trace: Trace) -> None:
    """Validates and writes; the file appears whole or not at all."""
    path = Path(path)
    arrays: dict[str, np.ndarray | np.generic] = {
        "ids": trace.ids,
        "probs_u8": trace.probs_u8,
        "tok": trace.tok,
        "lens": trace.lens,
        "seq_offsets": trace.seq_offsets,
        "num_experts": np.int32(trace.num_experts),
        "layer_index": trace.layer_index,
    }
    if trace.vocab_size is not None:
        arrays["vocab_size"] = np.int32(trace.vocab_size)
    if trace.split is not None:
        arrays["split"] = trace.split
    if trace.prefill_lens is not None:
        arrays["prefill_lens"] = trace.prefill_lens
    taken = set(trace.metadata) & {*_REQUIRED, *_OPTIONAL}
    if taken:
        raise TraceError(f"metadata may not use the names of fields: {', '.join(sorted(taken))}")
    arrays |= {name: np.asarray(array) for name, array in trace.metadata.items()}
    _from_arrays(arrays)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    os.replace(partial, path)


def _from_arrays(arrays: Mapping[str, Any]) -> Trace:
    missing = [name for name in _REQUIRED if name not in arrays]
    if missing:
        raise TraceError(f"missing {', '.join(missing)}: a trace has {', '.join(_REQUIRED)}")
    _check_dtypes(arrays)
    _check_shapes(arrays)
    _check_sequences(arrays)
    _check_ids(arrays["ids"], int(arrays["num_experts"]))
    vocabulary = int(arrays["vocab_size"]) if "vocab_size" in arrays else None
    _check_tokens(arrays["tok"], vocabulary)
    return Trace(
        ids=arrays["ids"],
        probs_u8=arrays["probs_u8"],
        tok=arrays["tok"],
        lens=arrays["lens"],
        seq_offsets=arrays["seq_offsets"],
        num_experts=int(arrays["num_experts"]),
        layer_index=arrays["layer_index"],
        vocab_size=vocabulary,
        split=arrays.get("split"),
        prefill_lens=arrays.get("prefill_lens"),
        metadata={k: v for k, v in arrays.items() if k not in _REQUIRED and k not in _OPTIONAL},
    )


def _check_dtypes(arrays: Mapping[str, Any]) -> None:
    exact = {"ids": (np.uint8, np.uint16), "probs_u8": (np.uint8,), "tok": (np.int32,)}
    for name, dtypes in exact.items():
        if arrays[name].dtype not in dtypes:
            expected = " or ".join(np.dtype(dtype).name for dtype in dtypes)
            raise TraceError(f"{name} has dtype {arrays[name].dtype}, expected {expected}")
    for name in ("lens", "seq_offsets", "num_experts", "layer_index", "vocab_size", "prefill_lens"):
        if name in arrays and arrays[name].dtype.kind not in "iu":
            raise TraceError(f"{name} has dtype {arrays[name].dtype}, expected an integer type")
    if "split" in arrays and arrays["split"].dtype.kind != "U":
        raise TraceError(f"split has dtype {arrays['split'].dtype}, expected strings")


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
