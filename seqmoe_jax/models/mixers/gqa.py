"""Grouped-query softmax attention, over all of the past or a sliding window of it.

Shapes: B sequences, T positions of each, H hidden, N query heads (num_heads), G key/value heads (num_kv_heads),
R = N / G, D = head_dim, C positions that the cache holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.arithmetic import linear
from pallas_kernels.backend import Implementation, loops_are_cheap
from pallas_kernels.decode_attention.reference import attend
from pallas_kernels.prompt_attention import attention_bytes, prompt_attention, unfit_sizes
from seqmoe_jax.models import ring
from seqmoe_jax.models.layers import write_barrier
from seqmoe_jax.models.norms import RMSNorm
from seqmoe_jax.models.rope import Rope
from seqmoe_jax.models.tensors import Take, Tensor, Tensors


class KV(NamedTuple):
    """Keys and values of one layer. With a window, position p lies at p mod C."""

    k: Float[Array, "B G C D"]
    v: Float[Array, "B G C D"]


class GQAWeights(NamedTuple):
    """Query, key and value projections (and the output gate's) are one matrix, rows in that order: one product
    instead of three."""

    qkv: Float[Array, "rows H"]
    o: Float[Array, "H ND"]
    qkv_bias: Float[Array, " rows"] | None
    o_bias: Float[Array, " H"] | None
    q_norm: Any  # [D] or [N D] and [D] or [G D], None without norms
    k_norm: Any
    sinks: Float[Array, " N"] | None


@dataclass(frozen=True, kw_only=True)
class GQA:
    """Attention of `num_heads` query heads over `num_kv_heads` key/value heads.

    scale: of the scores.
    qk_norm: queries and keys are normed by head, or over the full width of their projection.
    clip_qkv: queries, keys and values are clipped to +-clip_qkv after that.
    sliding_window: a position sees itself and the `sliding_window - 1` before it; None: all.
    output_gate: a head's output is multiplied by the sigmoid of a gate; rows of each head in `q` are query, then gate.
    sinks: a learned score per head joins the softmax, and the weight that it gets is dropped (arXiv 2309.17453).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    scale: float
    norm: RMSNorm
    qk_norm: Literal["head", "full"] | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    clip_qkv: float | None = None
    sliding_window: int | None = None
    sinks: bool = False
    output_gate: bool = False

    def tensors(self, hidden: int) -> Tensors:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        rows = {"q": 2 * queries if self.output_gate else queries, "k": keys, "v": keys}
        tensors = {name: Tensor(shape=(size, hidden)) for name, size in rows.items()}
        tensors["o"] = Tensor(shape=(hidden, queries))
        if self.qkv_bias:
            tensors |= {f"{name}_bias": Tensor(shape=(size,), init="zeros") for name, size in rows.items()}
        if self.o_bias:
            tensors["o_bias"] = Tensor(shape=(hidden,), init="zeros")
        if self.qk_norm:
            whole = self.qk_norm == "full"
            tensors["q_norm"] = self.norm.tensor(queries if whole else self.head_dim)
            tensors["k_norm"] = self.norm.tensor(keys if whole else self.head_dim)
        if self.sinks:
            tensors["sinks"] = Tensor(shape=(self.num_heads,), init="zeros")
        return tensors

    def assemble(self, take: Take) -> GQAWeights:
        if self.output_gate:
            q_gate = take("q").reshape(self.num_heads, 2, self.head_dim, -1)
            q, gate = (q_gate[:, part].reshape(-1, q_gate.shape[-1]) for part in range(2))
            qkv = jnp.concatenate([q, take("k", "v"), gate])
        else:
            qkv = take("q", "k", "v")
        return GQAWeights(
            qkv=qkv,
            o=take("o"),
            qkv_bias=take("q_bias", "k_bias", "v_bias") if self.qkv_bias else None,
            o_bias=take("o_bias") if self.o_bias else None,
            q_norm=take("q_norm") if self.qk_norm else None,
            k_norm=take("k_norm") if self.qk_norm else None,
            sinks=take("sinks") if self.sinks else None,
        )

    def init_state(self, batch: int, capacity: int, dtype: np.dtype) -> KV:
        held = capacity if self.sliding_window is None else min(self.sliding_window, capacity)
        shape = (batch, self.num_kv_heads, held, self.head_dim)
        return KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def unfit_chunks(self) -> str | None:
        return unfit_sizes(self.head_dim, self.head_dim)

    def workspace_bytes(self, batch: int, length: int, capacity: int) -> int:
        # Queries, keys and values with what norms and rotation make of them, and a window's keys and values once more.
        window = 0 if self.sliding_window is None else 2 * self.num_kv_heads * (self.sliding_window + length)
        heads = length * (self.num_heads + self.num_kv_heads)
        return 4 * batch * self.head_dim * (3 * heads + window) + attention_bytes(batch, length, self.num_heads)

    def apply(
        self,
        x: Float[Array, "B T H"],
        state: KV,
        positions: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
        weights: GQAWeights,
        implementation: Implementation = "xla",
    ) -> tuple[Float[Array, "B T H"], KV]:
        q, k, v, gate = self._project(x, positions, weights)
        start, held = positions[:, 0], state.k.shape[2]
        whole = self.sliding_window is not None or not loops_are_cheap()
        if x.shape[1] == 1 and whole:
            state = write_barrier(_write(state, k, v, positions % held))
            out = self._attend(q, state, positions, ring.positions(held, start), weights.sinks)
        elif self.sliding_window is None:
            # What padding writes lies behind every valid position, so it is masked until a later token overwrites it.
            state = write_barrier(_write(state, k, v, positions))
            out = self._attend_chunk(q, state, start, jnp.zeros_like(start), weights.sinks, implementation)
        else:
            # A chunk may overwrite positions that its own first queries see: read first, then write.
            past = (ring.ordered(part.swapaxes(1, 2), start) for part in state)
            seen = KV(*(_append(old, new) for old, new in zip(past, (k, v), strict=True)))
            out = self._attend_chunk(q, seen, start, start - held, weights.sinks, implementation)
            state = _write_window(state, k, v, positions, valid)
        out = out.reshape(*x.shape[:2], -1)
        return linear(out * jax.nn.sigmoid(gate) if self.output_gate else out, weights.o, weights.o_bias), state

    def _project(
        self, x: Float[Array, "B T H"], positions: Int[Array, "B T"], weights: GQAWeights
    ) -> tuple[Float[Array, "B T N D"], Float[Array, "B T G D"], Float[Array, "B T G D"], Float[Array, "B T gates"]]:
        """Queries, keys and values, normed and rotated, and the output gates (no columns if there are none)."""
        n, g, d = self.num_heads, self.num_kv_heads, self.head_dim
        ends = [n * d, (n + g) * d, (n + 2 * g) * d]
        q, k, v, gate = jnp.split(linear(x, weights.qkv, weights.qkv_bias), ends, axis=-1)
        if self.qk_norm == "full":
            q, k = self.norm(q, weights.q_norm), self.norm(k, weights.k_norm)
        if self.clip_qkv is not None:
            q, k, v = (jnp.clip(part, -self.clip_qkv, self.clip_qkv) for part in (q, k, v))
        q, k, v = (part.reshape(*x.shape[:2], -1, d) for part in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.norm(q, weights.q_norm), self.norm(k, weights.k_norm)
        return self.rope(q, positions), self.rope(k, positions), v, gate

    def _attend(
        self,
        q: Float[Array, "B 1 N D"],
        kv: KV,
        positions: Int[Array, "B 1"],
        key_positions: Int[Array, "B C"],
        sinks: Float[Array, " N"] | None,
    ) -> Float[Array, "B 1 G R D"]:
        """One query of every sequence over all that is held; later positions, and negative (empty) ones, are masked."""
        visible = (key_positions >= 0) & (key_positions <= positions)
        heads = self.num_kv_heads, self.num_heads // self.num_kv_heads
        sinks = None if sinks is None else sinks.reshape(heads)
        q = q.reshape(*q.shape[:2], *heads, self.head_dim)
        return attend(q, kv.k, kv.v, visible[:, None, None, None], scale=self.scale, sinks=sinks)

    def _attend_chunk(
        self,
        q: Float[Array, "B T N D"],
        kv: KV,
        first_query: Int[Array, " B"],
        first_key: Int[Array, " B"],
        sinks: Float[Array, " N"] | None,
        implementation: Implementation,
    ) -> Float[Array, "B T N D"]:
        kernel: Implementation = "xla" if self.unfit_chunks() else implementation
        return prompt_attention(
            q.astype(kv.k.dtype), *kv, first_query, first_key, scale=self.scale, window=self.sliding_window,
            sinks=sinks, implementation=kernel,
        ).astype(q.dtype)  # fmt: skip


def _write(kv: KV, k: Float[Array, "B T G D"], v: Float[Array, "B T G D"], places: Int[Array, "B T"]) -> KV:
    """New keys and values into the cache, in place under donation. Places of a row are consecutive."""
    if k.shape[0] == 1:
        start = (0, 0, places[0, 0], 0)
        return KV(
            lax.dynamic_update_slice(kv.k, k.swapaxes(1, 2).astype(kv.k.dtype), start),
            lax.dynamic_update_slice(kv.v, v.swapaxes(1, 2).astype(kv.v.dtype), start),
        )
    rows = jnp.arange(k.shape[0])[:, None]
    return KV(kv.k.at[rows, :, places].set(k.astype(kv.k.dtype)), kv.v.at[rows, :, places].set(v.astype(kv.v.dtype)))


def _append(held: Float[Array, "B C G D"], new: Float[Array, "B T G D"]) -> Float[Array, "B G CT D"]:
    return jnp.concatenate([held, new.astype(held.dtype)], axis=1).swapaxes(1, 2)


def _write_window(
    kv: KV,
    k: Float[Array, "B T G D"],
    v: Float[Array, "B T G D"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> KV:
    """A chunk into a window's cache: every place gets the last valid position that belongs there."""
    first = positions[:, :1]
    index = ring.positions(kv.k.shape[2], first[:, 0] + valid.sum(axis=1) - 1) - first

    def place(old: Float[Array, "B G C D"], new: Float[Array, "B T G D"]) -> Float[Array, "B G C D"]:
        rows = jnp.take_along_axis(new, jnp.clip(index, 0, new.shape[1] - 1)[:, :, None, None], axis=1)
        return jnp.where(index[:, None, :, None] >= 0, rows.swapaxes(1, 2).astype(old.dtype), old)

    return KV(place(kv.k, k), place(kv.v, v))
