"""DeepSeek-V4's attention (section 2.3 of its report): a sliding window, and behind it a compressed past.

One vector per position is key and value for all heads. Queries see the last W positions and, by kind of layer, nothing
else (SWA), the entries of an overlapping compressor that an indexer chooses (CSA), or all entries of a strong
compressor (HCA). As values carry their position too, the output is rotated back by that of the query.

Shapes: N heads (num_heads), D = head_dim, Q = q_lora_rank, W = sliding_window, E entries of the compressed past, O =
o_groups, R = o_lora_rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from pallas_kernels.arithmetic import einsum, linear, softmax
from pallas_kernels.backend import Implementation
from seqmoe_jax.models import ring
from seqmoe_jax.models.mixers.compressor import Compressor, CompressorState, CompressorWeights, Indexer, IndexerWeights
from seqmoe_jax.models.norms import RMSNorm
from seqmoe_jax.models.rope import Rope
from seqmoe_jax.models.tensors import FLOAT32, Take, Tensor, Tensors, below, take_below

QUERY_BLOCK = 256  # queries of a chunk that are scored at once: bounds the score matrix


class CompressedWeights(NamedTuple):
    q_a: Float[Array, "Q H"]
    q_norm: Float[Array, " Q"]
    q_b: Float[Array, "ND Q"]
    kv: Float[Array, "D H"]
    kv_norm: Float[Array, " D"]
    o_a: Float[Array, "O R NDO"]
    o_b: Float[Array, "H OR"]
    sinks: Float32[Array, " N"]
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


class CompressedState(NamedTuple):
    """What a layer keeps of a sequence: the window's vectors as a ring, the compressed past, and the indexer's keys.

    It cannot be rolled back.
    """

    window: Float[Array, "B W D"]
    compressed: CompressorState | None
    indexer: CompressorState | None


class _Keys(NamedTuple):
    """What a block of queries may see: the window's keys with their positions, and the entries."""

    window: Float[Array, "B w D"]
    positions: Int[Array, "B w"]
    entries: Float[Array, "B E D"] | None
    index_keys: Float[Array, "B E J"] | None


@dataclass(frozen=True, kw_only=True)
class CompressedAttention:
    """SWA without a compressor, HCA with one, CSA with an indexer too.

    rope: rotates the last dimensions of a head.
    o_groups, o_lora_rank: each group of heads is mapped to `o_lora_rank` channels, all of these to the hidden state.
    """

    num_heads: int
    head_dim: int
    q_lora_rank: int
    sliding_window: int
    rope: Rope
    norm: RMSNorm
    o_groups: int
    o_lora_rank: int
    compressor: Compressor | None = None
    indexer: Indexer | None = None

    def tensors(self, hidden: int) -> Tensors:
        tensors = {
            "q_a": Tensor(shape=(self.q_lora_rank, hidden)),
            "q_norm": self.norm.tensor(self.q_lora_rank),
            "q_b": Tensor(shape=(self.num_heads * self.head_dim, self.q_lora_rank)),
            "kv": Tensor(shape=(self.head_dim, hidden)),
            "kv_norm": self.norm.tensor(self.head_dim),
            "o_a": Tensor(shape=(self.o_groups * self.o_lora_rank, self.num_heads * self.head_dim // self.o_groups)),
            "o_b": Tensor(shape=(hidden, self.o_groups * self.o_lora_rank)),
            "sinks": Tensor(shape=(self.num_heads,), init="zeros", dtype=FLOAT32),
        }
        if self.compressor is not None:
            tensors |= below("compressor", self.compressor.tensors(hidden))
        if self.indexer is not None:
            tensors |= below("indexer", self.indexer.tensors(hidden))
        return tensors

    def assemble(self, take: Take) -> CompressedWeights:
        compressor, indexer = self.compressor, self.indexer
        return CompressedWeights(
            q_a=take("q_a"),
            q_norm=take("q_norm"),
            q_b=take("q_b"),
            kv=take("kv"),
            kv_norm=take("kv_norm"),
            o_a=take("o_a").reshape(self.o_groups, self.o_lora_rank, -1),
            o_b=take("o_b"),
            sinks=take("sinks"),
            compressor=None if compressor is None else compressor.assemble(take_below("compressor", take)),
            indexer=None if indexer is None else indexer.assemble(take_below("indexer", take)),
        )

    def init_state(self, batch: int, capacity: int, dtype: np.dtype) -> CompressedState:
        compressor, indexer = self.compressor, self.indexer
        return CompressedState(
            window=jnp.zeros((batch, self.sliding_window, self.head_dim), dtype),
            compressed=None if compressor is None else compressor.init_state(batch, capacity, dtype),
            indexer=None if indexer is None else indexer.compressor.init_state(batch, capacity, dtype),
        )

    def unfit_chunks(self) -> str | None:
        return "no kernel for compressed attention"

    def workspace_bytes(self, batch: int, length: int, capacity: int) -> int:
        entries = 0 if self.compressor is None else -(-capacity // self.compressor.compress_ratio)
        block = batch * min(length, QUERY_BLOCK)
        scores = 3 * block * self.num_heads * (self.sliding_window + length + entries)
        index = 0 if self.indexer is None else 2 * block * self.indexer.num_heads * entries
        return 4 * (scores + index + 3 * batch * length * self.num_heads * self.head_dim)

    def apply(
        self,
        x: Float[Array, "B T H"],
        state: CompressedState,
        positions: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
        weights: CompressedWeights,
        implementation: Implementation = "xla",
    ) -> tuple[Float[Array, "B T H"], CompressedState]:
        latent = self.norm(linear(x, weights.q_a), weights.q_norm)
        q = linear(latent, weights.q_b).reshape(*x.shape[:2], self.num_heads, self.head_dim)
        q = self.rope(_unit(q, self.norm.eps), positions)
        kv = self.rope(self.norm(linear(x, weights.kv), weights.kv_norm)[:, :, None], positions)[:, :, 0]
        window = ring.push(state.window, kv, positions, valid)
        if x.shape[1] == 1:
            seen, where = window, ring.positions(window.shape[1], positions[:, 0])
        else:
            start = positions[:, :1]
            seen = jnp.concatenate([ring.ordered(state.window, start[:, 0]), kv], axis=1)
            where = start - self.sliding_window + jnp.arange(seen.shape[1])
        compressed, index, chosen = state.compressed, state.indexer, None
        if self.compressor is not None:
            assert compressed is not None
            assert weights.compressor is not None
            compressed = self.compressor.apply(x, compressed, positions, valid, weights.compressor)
        if self.indexer is not None:
            assert index is not None
            assert weights.indexer is not None
            index = self.indexer.compressor.apply(x, index, positions, valid, weights.indexer.compressor)
            if index.entries.shape[1] > self.indexer.top_k:  # else all are among the best
                chosen = self.indexer.queries(x, latent, positions, weights.indexer)
        entries = None if compressed is None else compressed.entries
        keys = _Keys(seen, where, entries, None if index is None else index.entries)
        out = _in_query_blocks(
            lambda q, at, chosen: self._attend(q, at, chosen, keys, weights.sinks), q, positions, chosen
        )
        out = self.rope(out, positions, inverse=True).reshape(*x.shape[:2], self.o_groups, -1)
        out = einsum("btgi,gri->btgr", out, weights.o_a).astype(x.dtype)
        return linear(out.reshape(*x.shape[:2], -1), weights.o_b), CompressedState(window, compressed, index)

    def _attend(
        self,
        q: Float[Array, "B T N D"],
        positions: Int[Array, "B T"],
        chosen: tuple[Float[Array, "B T I J"], Float32[Array, "B T I"]] | None,
        keys: _Keys,
        sinks: Float32[Array, " N"],
    ) -> Float[Array, "B T N D"]:
        where, at = keys.positions[:, None], positions[..., None]
        parts = [(keys.window, (where >= 0) & (where <= at) & (where > at - self.sliding_window))]
        if self.compressor is not None:
            assert keys.entries is not None
            entries, visible = keys.entries, self.compressor.visible(positions, keys.entries.shape[1])
            if self.indexer is not None and chosen is not None:
                assert keys.index_keys is not None
                best = self.indexer.choose(*chosen, positions, keys.index_keys)
                if q.shape[1] == 1:
                    entries = jnp.take_along_axis(entries, best[:, 0, :, None], axis=1)
                    visible = jnp.take_along_axis(visible, best, axis=-1)
                else:
                    kept = jnp.zeros_like(visible)
                    visible &= jnp.put_along_axis(kept, best, True, axis=-1, inplace=False)
            parts.append((entries, visible))
        # In this order of operands and axes: in others XLA:CPU transposes a cache, and for that writes it twice.
        scores = [einsum("bcd,btnd->bcnt", part, q).transpose(0, 2, 3, 1) for part, _ in parts]
        masked = [jnp.where(seen[:, None], score, -jnp.inf) for score, (_, seen) in zip(scores, parts, strict=True)]
        shares = softmax(jnp.concatenate(masked, axis=-1) * self.head_dim**-0.5, sinks).astype(q.dtype)
        mixed = [
            einsum("bntc,bcd->btnd", share, part)
            for share, (part, _) in zip(jnp.split(shares, [keys.window.shape[1]], axis=-1), parts, strict=False)
        ]
        return sum(mixed[1:], mixed[0]).astype(q.dtype)


def _unit(x: Float[Array, "*batch D"], eps: float) -> Float[Array, "*batch D"]:
    """RMS norm without a weight; the reciprocal root is rounded before it multiplies, as in transformers."""
    x32 = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps).astype(x.dtype)


def _in_query_blocks(attend: Callable[..., Float[Array, "B t *out"]], *queries: Any) -> Float[Array, "B T *out"]:
    """`attend` over blocks of axis 1 of `queries` (pytrees of `[B, T, ...]`: the queries and what goes with each)."""
    length = jax.tree.leaves(queries)[0].shape[1]
    if length <= QUERY_BLOCK or length % QUERY_BLOCK:
        return attend(*queries)

    def split(array: Shaped[Array, "B T *item"]) -> Shaped[Array, "n B t *item"]:
        return array.reshape(array.shape[0], -1, QUERY_BLOCK, *array.shape[2:]).swapaxes(0, 1)

    out = lax.map(lambda block: attend(*block), jax.tree.map(split, queries)).swapaxes(0, 1)
    return out.reshape(out.shape[0], length, *out.shape[3:])
