"""What a checkpoint's files say of its model, whatever `config.json` says: a head of its own, and dtypes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce

import ml_dtypes
import numpy as np

from seqmoe_jax.checkpoints.names import names_of
from seqmoe_jax.checkpoints.safetensors import Checkpoint
from seqmoe_jax.models.spec import ModelSpec

log = logging.getLogger("seqmoe_jax")

FLOATS = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))
FLOAT32 = FLOATS[0]
READ = 16 << 20  # values that are compared at a time


def as_stored(spec: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    """The spec that the files call for.

    A head in the files that differs from the embedding is the model's, though `config.json` ties them (as in
    transformers). Experts that are not quantised keep the dtype they are stored in, and the model's dtype is one that
    loses nothing: configurations often name no dtype, or that of another copy of the weights.
    """
    untied = replace(spec, tied=False)
    names = names_of(untied, checkpoint.names)
    embed, head = names.dense["embed"].tensor, names.dense["lm_head"].tensor
    if spec.tied and {embed, head} <= checkpoint.names and not _equal(checkpoint, embed, head):
        log.info("%s: config.json ties the output head to the embedding, but the files have one of its own: it is used",
                 checkpoint.directory)  # fmt: skip
        spec = untied
    stored = _float(checkpoint, embed)
    if stored is not None:
        spec = replace(spec, dtype=_widest(spec.dtype, stored))
    if spec.expert_dtype in FLOATS:
        tensors = {source.tensor for layer in names.experts for expert in layer for source in expert.values()}
        found = {dtype for name in tensors if (dtype := _float(checkpoint, name)) is not None}
        spec = replace(spec, expert_dtype=reduce(_widest, found) if found else spec.expert_dtype)
    return spec


def _float(checkpoint: Checkpoint, name: str) -> np.dtype | None:
    """The dtype in which a tensor's values are kept, None where it is quantised or not there."""
    if name not in checkpoint.names:
        return None
    dtype = checkpoint.info(name).dtype
    return FLOAT32 if dtype == np.float64 else dtype if dtype in FLOATS else None


def _widest(one: np.dtype, other: np.dtype) -> np.dtype:
    """float32 unless both are the same: float16 and bfloat16 hold what the other does not."""
    return one if one == other else FLOAT32


def _equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    infos = [checkpoint.info(name) for name in (one, other)]
    if infos[0].shape != infos[1].shape:
        return False
    pairs = zip(*(_pieces(checkpoint, name) for name in (one, other)), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def _pieces(checkpoint: Checkpoint, name: str) -> Iterator[np.ndarray]:
    """The values of a tensor in float32, a piece at a time."""
    info = checkpoint.info(name)
    size, whole = info.dtype.itemsize, info.nbytes
    for start in range(0, whole, READ * size):
        raw = np.empty(min(READ * size, whole - start), np.uint8)
        checkpoint.read_into(name, raw, start)
        yield raw.view(info.dtype).astype(np.float32)
