"""A past compressed to one entry per window of tokens, and the indexer that finds the entries worth attending to.

DeepSeek-V4's token-level compressor and lightning indexer (sections 2.3.1 and 2.3.2 of its report). A token gives a
key-value vector and a gate. Entry i is the sum of the vectors of its window's tokens, weighed per channel by a softmax
of their gates plus a learned bias by place in the window (`ape`, the absolute position embedding). With overlap a
token gives two series of both, and entry i takes the first series of window i - 1 and the second of window i. An entry
is normed and rotated to its window's first position. Position t sees entry i once window i is whole:
i < (t + 1) // compress_ratio.

Shapes: M = compress_ratio tokens of a window, D = head_dim of an entry, S series (1, or 2 with overlap), CG vectors and
gates of all series, E entries that the cache holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from pallas_kernels.arithmetic import einsum, linear
from seqmoe_jax.models import ring
from seqmoe_jax.models.layers import write_barrier
from seqmoe_jax.models.norms import RMSNorm
from seqmoe_jax.models.rope import Rope
from seqmoe_jax.models.tensors import FLOAT32, Take, Tensor, Tensors, below, take_below


class CompressorWeights(NamedTuple):
    """Rows of `kv_gate` are the key-value vectors of all series, then their gates."""

    kv_gate: Float[Array, "CG H"]
    ape: Float32[Array, "M SD"]
    norm: Float[Array, " D"]


class CompressorState(NamedTuple):
    """`tokens` is a ring of the vectors and gates of the S windows that the next entry may take from.

    The entry of a window that is not whole yet is written as well. Nothing sees it before it is right.
    """

    tokens: Float[Array, "B SM CG"]
    entries: Float[Array, "B E D"]


@dataclass(frozen=True, kw_only=True)
class Compressor:
    compress_ratio: int
    head_dim: int
    overlap: bool
    rope: Rope
    norm: RMSNorm

    @property
    def series(self) -> int:
        return 2 if self.overlap else 1

    def tensors(self, hidden: int) -> Tensors:
        width = self.series * self.head_dim
        return {
            "kv": Tensor(shape=(width, hidden)),
            "gate": Tensor(shape=(width, hidden)),
            "ape": Tensor(shape=(self.compress_ratio, width), init="zeros", dtype=FLOAT32),
            "norm": self.norm.tensor(self.head_dim),
        }

    def assemble(self, take: Take) -> CompressorWeights:
        return CompressorWeights(kv_gate=take("kv", "gate"), ape=take("ape"), norm=take("norm"))

    def init_state(self, batch: int, capacity: int, dtype: np.dtype) -> CompressorState:
        width = 2 * self.series * self.head_dim
        return CompressorState(
            tokens=jnp.zeros((batch, self.series * self.compress_ratio, width), dtype),
            entries=jnp.zeros((batch, -(-capacity // self.compress_ratio), self.head_dim), dtype),
        )

    def visible(self, positions: Int[Array, "B T"], entries: int) -> Bool[Array, "B T E"]:
        """Which of the first `entries` entries a position sees."""
        return jnp.arange(entries) < (positions[..., None] + 1) // self.compress_ratio

    def apply(
        self,
        x: Float[Array, "B T H"],
        state: CompressorState,
        positions: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
        weights: CompressorWeights,
    ) -> CompressorState:
        """The state after T more tokens. What padding leaves in an entry is written over before it can be seen."""
        new = linear(x, weights.kv_gate)
        tokens = ring.push(state.tokens, new, positions, valid)
        first = positions[:, :1] // self.compress_ratio
        if x.shape[1] == 1:
            # Window w lies at part w mod S of the ring: the S windows up to the current one, in order.
            parts = tokens.reshape(tokens.shape[0], self.series, self.compress_ratio, -1)
            order = (first + 1 + jnp.arange(self.series)) % self.series
            windows = jnp.take_along_axis(parts, order[:, :, None, None], axis=1)[:, None]
        else:
            windows = self._windows(state.tokens, new, positions[:, 0])
        index = first + jnp.arange(windows.shape[1], dtype=jnp.int32)
        entries = self._pool(windows, index, weights).astype(state.entries.dtype)
        return CompressorState(tokens, write_barrier(_write(state.entries, entries, index)))

    def _windows(
        self, past: Float[Array, "B SM CG"], new: Float[Array, "B T CG"], start: Int[Array, " B"]
    ) -> Float[Array, "B n S M CG"]:
        """The tokens of each of the n windows that `new` may touch, with those of the S - 1 windows before it."""
        count = (new.shape[1] + self.compress_ratio - 2) // self.compress_ratio + 1
        length = (count + self.series - 1) * self.compress_ratio
        stream = jnp.concatenate([ring.ordered(past, start), new], axis=1)
        stream = jnp.pad(stream, [(0, 0), (0, self.compress_ratio), (0, 0)])
        skip = (
            self.compress_ratio - start % self.compress_ratio
        )  # the stream starts so many tokens before a window does
        index = skip[:, None] + jnp.arange(length)
        aligned = jnp.take_along_axis(stream, jnp.minimum(index, stream.shape[1] - 1)[..., None], axis=1)
        parts = aligned.reshape(new.shape[0], -1, self.compress_ratio, new.shape[-1])
        return jnp.stack([parts[:, j : j + count] for j in range(self.series)], axis=2)

    def _pool(
        self, windows: Float[Array, "B n S M CG"], index: Int[Array, "B n"], weights: CompressorWeights
    ) -> Float[Array, "B n D"]:
        """Entries `index`; before the start of the sequence there is no window."""
        kv, gate = jnp.split(windows, 2, axis=-1)
        gate = gate.astype(jnp.float32) + weights.ape
        exists = index[:, :, None] + jnp.arange(1 - self.series, 1) >= 0
        gate = jnp.where(exists[..., None, None], gate, -jnp.inf)

        def own(values: Float[Array, "B n S M SD"]) -> Float[Array, "B n SM D"]:
            """Of the older window the first series, of the newer the second."""
            parts = [values[:, :, s, :, s * self.head_dim : (s + 1) * self.head_dim] for s in range(self.series)]
            return jnp.concatenate(parts, axis=2)

        share = jax.nn.softmax(own(gate), axis=2)
        entry = (own(kv).astype(jnp.float32) * share).sum(axis=2).astype(windows.dtype)
        return self.rope(self.norm(entry, weights.norm)[:, :, None], index * self.compress_ratio)[:, :, 0]


class IndexerWeights(NamedTuple):
    compressor: CompressorWeights
    q_b: Float[Array, "IJ Q"]
    weights_proj: Float[Array, "I H"]


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """Scores entries for every position by `num_heads` small queries over compressed keys of its own:

    score(t, i) = sum_h w_h(t) relu(q_h(t) . k_i), scaled by num_heads^-1/2 and head_dim^-1/2. Attention sees the
    `top_k` visible entries with the highest scores.

    Shapes: I heads, J = the compressor's head_dim.
    """

    num_heads: int
    top_k: int
    compressor: Compressor
    q_lora_rank: int

    def tensors(self, hidden: int) -> Tensors:
        return {
            "q_b": Tensor(shape=(self.num_heads * self.compressor.head_dim, self.q_lora_rank)),
            "weights_proj": Tensor(shape=(self.num_heads, hidden)),
            **below("compressor", self.compressor.tensors(hidden)),
        }

    def assemble(self, take: Take) -> IndexerWeights:
        compressor = self.compressor.assemble(take_below("compressor", take))
        return IndexerWeights(compressor=compressor, q_b=take("q_b"), weights_proj=take("weights_proj"))

    def queries(
        self,
        x: Float[Array, "B T H"],
        latent: Float[Array, "B T Q"],
        positions: Int[Array, "B T"],
        weights: IndexerWeights,
    ) -> tuple[Float[Array, "B T I J"], Float32[Array, "B T I"]]:
        """Rotated queries, and the weight of each head."""
        q = linear(latent, weights.q_b).reshape(*x.shape[:2], self.num_heads, -1)
        share = (
            linear(x, weights.weights_proj).astype(jnp.float32) * (self.num_heads * self.compressor.head_dim) ** -0.5
        )
        return self.compressor.rope(q, positions), share

    def choose(
        self,
        q: Float[Array, "B T I J"],
        share: Float32[Array, "B T I"],
        positions: Int[Array, "B T"],
        keys: Float[Array, "B E J"],
    ) -> Int[Array, "B T best"]:
        """The best entries of every position, the lowest index first among equals; where fewer are visible, any."""
        # In this order of operands and axes: in others XLA:CPU transposes the keys, and for that writes them twice.
        scores = jax.nn.relu(einsum("bej,btij->beit", keys, q)) * share.swapaxes(1, 2)[:, None]
        scores = scores.sum(axis=2).swapaxes(1, 2)
        visible = self.compressor.visible(positions, keys.shape[1])
        return lax.top_k(jnp.where(visible, scores, -jnp.inf), self.top_k)[1]


def _write(
    entries: Float[Array, "B E D"], new: Float[Array, "B n D"], index: Int[Array, "B n"]
) -> Float[Array, "B E D"]:
    """In place under donation; what lies behind the capacity is dropped."""
    if new.shape[:2] == (1, 1):
        return lax.dynamic_update_slice(entries, new, (0, index[0, 0], 0))
    rows = jnp.arange(new.shape[0])[:, None]
    return entries.at[rows, index].set(new, mode="drop")
