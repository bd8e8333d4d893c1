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

Every other array is metadata. It is kept; one with N rows is taken to be per sequence. `run`, which the commands write,
is what a trace was made from and how, as JSON.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float32, Int32, Integer, UInt8

from seqmoe_jax.display import table
from seqmoe_jax.errors import TraceError
from seqmoe_jax.outputs.runs import Run, from_json
from seqmoe_jax.traces.archive import names_in, read_arrays, read_text, write_arrays
from seqmoe_jax.traces.validation import OPTIONAL, REQUIRED, check_arrays, check_headers

if TYPE_CHECKING:
    from seqmoe_jax.api import Engine


@dataclass(frozen=True, kw_only=True, repr=False)
class Trace:
    """Expert activations of N sequences, T steps in all. Fields as in the module's table.

    `Trace.record` makes one, `Trace.load` and `save` read and write the file.
    """

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

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Reads a trace file, validated in full. Raises `TraceError` in one line for anything wrong with it."""
        return read_trace(path)

    @staticmethod
    def record(engine: Engine, prompts: Sequence[Any], out: str | os.PathLike[str] | None = None, **how: Any) -> Trace:
        """The routing of an engine's model on prompts, text or token ids, and on what it makes of them.

        `out` and `how` are those of `traces.record.record_prompts`: `max_new_tokens` (256), `splits`, `sampling`,
        `model`, `force`, `progress`.
        """
        from seqmoe_jax.traces.record import record_prompts

        return record_prompts(engine, prompts, out, **how)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, whole or not at all. Raises `TraceError` or `OutputError`."""
        write_trace(path, self)

    def __repr__(self) -> str:
        splits = "" if self.split is None else f", splits {', '.join(map(str, np.unique(self.split)))}"
        return (
            f"Trace({self.model or 'unnamed'}: {self.sequences} sequences, {self.steps:,} steps, {self.layers} layers "
            f"of {self.num_experts} experts, {self.active} active{splits})"
        )

    def _repr_html_(self) -> str:
        rows: dict[str, object] = {
            "sequences": self.sequences,
            "steps": f"{self.steps:,}, of them {int(self.decoded().sum()):,} decoded",
            "layers": self.layers,
            "experts": f"{self.num_experts} in each, {self.active} active",
        }
        if self.split is not None:
            names, counts = np.unique(self.split, return_counts=True)
            rows["splits"] = ", ".join(f"{name} ({count})" for name, count in zip(names, counts, strict=True))
        return table(f"Trace of {self.model or 'an unnamed model'}", rows)

    @property
    def steps(self) -> int:
        """T."""
        return int(self.ids.shape[0])

    @property
    def layers(self) -> int:
        """L."""
        return int(self.ids.shape[1])

    @property
    def active(self) -> int:
        """K."""
        return int(self.ids.shape[2])

    @property
    def sequences(self) -> int:
        """N."""
        return int(self.lens.shape[0])

    @property
    def sizes(self) -> dict[str, int]:
        """L, E and K as `layers`, `experts`, `active`."""
        return {"layers": self.layers, "experts": self.num_experts, "active": self.active}

    @property
    def model(self) -> str | None:
        """Which model it is of, where its metadata says."""
        return str(self.metadata["model"]) if "model" in self.metadata else None

    @property
    def digest(self) -> str:
        """Tells its steps from all others."""
        said = hashlib.sha256(json.dumps([self.sizes, self.vocab_size]).encode())
        for part in (self.ids, self.probs_u8, self.tok, self.lens, self.prefill_lens, self.split):
            said.update(b"" if part is None else np.ascontiguousarray(part).data.cast("B"))
        return said.hexdigest()[:16]

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

    def weights(self, start: int = 0, stop: int | None = None) -> Float32[np.ndarray, "t L E"]:
        """The router's weights in the steps [start, stop): they sum to 1 over the activated experts, 0 elsewhere."""
        ids = self.ids[start:stop].astype(np.int64)
        weights = np.zeros((*ids.shape[:2], self.num_experts), np.float32)
        share = self.probs_u8[start:stop].astype(np.float32)
        share /= np.maximum(share.sum(axis=2, keepdims=True), 1)
        np.put_along_axis(weights, ids, share, axis=2)
        return weights

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
        prompts = 0 if self.prefill_lens is None else self.prefill_lens
        return np.arange(self.steps) >= np.repeat(self.seq_offsets[:-1] + prompts, self.lens)

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
        share: Float32[np.ndarray, " keys"] = (counts / chosen.sum()).astype(np.float32)
        return share.reshape(self.layers, self.num_experts)


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
    arrays = read_arrays(path, "a trace file", check_headers)
    try:
        check_arrays(arrays)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    fields = {name: arrays.pop(name) for name in (*REQUIRED, *OPTIONAL) if name in arrays}
    fields |= {name: int(fields[name]) for name in ("num_experts", "vocab_size") if name in fields}
    # NumPy counts with no uint64; what was checked fits.
    fields |= {name: fields[name].astype(np.int64) for name in ("lens", "seq_offsets", "prefill_lens", "layer_index")
               if name in fields and fields[name].dtype == np.uint64}  # fmt: skip
    return Trace(**fields, metadata=arrays)


def read_run(path: str | os.PathLike[str]) -> Run | None:
    """The run that a trace was made by: empty where it does not say, None where the file is no trace."""
    if not names_in(path) >= set(REQUIRED):
        return None
    said = read_text(path, "run")
    return {} if said is None else from_json(said)


def write_trace(path: str | os.PathLike[str], trace: Trace, *, beside: Path | None = None) -> None:
    """Validates and writes; the file appears whole or not at all, until then it is in the directory `beside`.

    Raises `TraceError` or `OutputError`.
    """
    taken = set(trace.metadata) & {*REQUIRED, *OPTIONAL}
    if taken:
        raise TraceError(f"metadata may not use the names of fields: {', '.join(sorted(taken))}")
    fields = {name: getattr(trace, name) for name in (*REQUIRED, *OPTIONAL)}
    arrays = {name: np.int32(value) if isinstance(value, int) else value for name, value in fields.items()}
    arrays = {name: value for name, value in arrays.items() if value is not None}
    arrays |= {name: np.asarray(array) for name, array in trace.metadata.items()}
    check_headers(arrays)
    check_arrays(arrays)
    write_arrays(path, arrays, compressed=True, beside=beside)
