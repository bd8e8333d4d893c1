"""Token shards in memory: random training windows drawn on the device, fixed validation windows."""

from __future__ import annotations

import json
import lzma
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from tokenizers import Tokenizer

END = 0  # id of <|endoftext|>
SNAPPED = 0.25  # share of windows that start where a document starts


class TrainingText(NamedTuple):
    """All sources one after another, on the device."""

    tokens: Int[Array, "N"]
    document_starts: Int[Array, "D"]  # position of the first token of each document
    source_starts: Int[Array, "S"]
    source_lengths: Int[Array, "S"]
    log_weights: Array  # log of each source's share of the windows


class ValidationText(NamedTuple):
    """Windows of T+1 tokens; targets with mask 0 are padding or `<|endoftext|>`."""

    windows: np.ndarray  # uint16 [W, T+1]
    mask: np.ndarray  # bool [W, T]
    source: np.ndarray  # int [W]: index into the report's rows
    bytes_of_text: np.ndarray  # int [S]: bytes of the targets


def read_report(folder: Path) -> list[dict[str, Any]]:
    """`corpus.json`."""
    report: list[dict[str, Any]] = json.loads((folder / "corpus.json").read_text())
    return report


def read_shard(path: Path) -> np.ndarray:
    return np.frombuffer(lzma.decompress(path.read_bytes()), np.uint16)


def read_shards(folder: Path, report: list[dict[str, Any]], part: str) -> list[np.ndarray]:
    paths = [folder / f"{row['name']}.{part}.u16.xz" for row in report]
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(read_shard, paths))


def load_training(folder: Path, window: int) -> TrainingText:
    """The training tokens with weights `rate * tokens`; sources shorter than a window are left out."""
    report = read_report(folder)
    pairs = [
        (row, shard)
        for row, shard in zip(report, read_shards(folder, report, "train"), strict=True)
        if len(shard) > window
    ]
    shards = [shard for _, shard in pairs]
    tokens = np.concatenate(shards)
    lengths = np.array([len(shard) for shard in shards])
    weights = np.array([row["rate"] * len(shard) for row, shard in pairs])
    return TrainingText(
        jnp.asarray(tokens),
        jnp.asarray(np.flatnonzero(tokens == END) + 1, jnp.int32),
        jnp.asarray(np.cumsum(lengths) - lengths, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(np.log(weights / weights.sum()), jnp.float32),
    )


def draw(text: TrainingText, key: Array, batch: int, window: int) -> Int[Array, "B W"]:
    """Random windows: a source by weight, a place in it uniformly, sometimes moved back to a document's start."""
    pick, place, snap = jax.random.split(key, 3)
    source = jax.random.categorical(pick, text.log_weights, shape=(batch,))
    last = text.source_lengths[source] - window
    offset = (jax.random.uniform(place, (batch,)) * (last + 1)).astype(jnp.int32)
    start = text.source_starts[source] + jnp.minimum(offset, last)
    index = jnp.searchsorted(text.document_starts, start, side="right") - 1
    snapped = jnp.maximum(text.document_starts[index], text.source_starts[source])
    start = jnp.where(jax.random.uniform(snap, (batch,)) < SNAPPED, snapped, start)
    return text.tokens[start[:, None] + jnp.arange(window)].astype(jnp.int32)


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of text that each token stands for; 0 for the special ones."""
    special = set(tokenizer.get_added_tokens_decoder())
    size = tokenizer.get_vocab_size()
    lengths = [0 if i in special else len(tokenizer.id_to_token(i) or "") for i in range(size)]
    return np.array(lengths)


def load_validation(folder: Path, length: int, limit: int | None = None) -> ValidationText:
    """The held-out documents of every source in windows that share one token with the next; `limit` windows each."""
    report = read_report(folder)
    sizes = token_bytes(Tokenizer.from_file(str(folder / "tokenizer.json")))
    windows, masks, sources = [], [], []
    for index, shard in enumerate(read_shards(folder, report, "val")):
        for start in list(range(0, len(shard) - 1, length))[:limit]:
            piece = shard[start : start + length + 1]
            padded = np.full(length + 1, END, np.uint16)
            padded[: len(piece)] = piece
            windows.append(padded)
            masks.append(padded[1:] != END)
            sources.append(index)
    stacked, source = np.stack(windows), np.array(sources)
    mask = np.stack(masks)
    per_window = (sizes[stacked[:, 1:]] * mask).sum(1)
    return ValidationText(stacked, mask, source, np.bincount(source, per_window, len(report)).astype(np.int64))
