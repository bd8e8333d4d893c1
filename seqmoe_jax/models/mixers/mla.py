"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values are maps of one latent.

The cache holds the latent and one rotary key for all heads, never a head's own keys or values: the map from latent to
key is applied to the query, the map from latent to value to the weighted sum of latents (the paper's absorbed form).
Prefill does the same. It multiplies more than it would with expanded keys, but beside the experts' transfer that is
little, and the expanded keys of a long past would be large.

Shapes: N heads (num_heads), P = qk_nope_head_dim, R = qk_rope_head_dim, V = v_head_dim, L = kv_lora_rank, Q =
q_lora_rank, C positions that the cache holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.arithmetic import einsum, linear, softmax
from pallas_kernels.backend import Implementation
from pallas_kernels.prompt_attention import attention_bytes, prompt_attention, unfit_sizes
from seqmoe_jax.models.layers import write_barrier
from seqmoe_jax.models.norms import RMSNorm
from seqmoe_jax.models.rope import Rope
from seqmoe_jax.models.tensors import Take, Tensor, Tensors


class LatentQuery(NamedTuple):
    """Queries as maps of a latent of their own (`q_lora_rank`)."""

    a: Float[Array, "Q H"]
    norm: Float[Array, " Q"]
    b: Float[Array, "NPR Q"]


class MLAWeights(NamedTuple):
    """Rows of `kv_a` are the latent, then the rotary key; rows of each head in a query are P, then R."""

    q: Float[Array, "NPR H"] | LatentQuery
    kv_a: Float[Array, "LR H"]
    kv_norm: Float[Array, " L"]
    k_b: Float[Array, "N P L"]
    v_b: Float[Array, "N V L"]
    o: Float[Array, "H NV"]


class MLAState(NamedTuple):
    """Of every position, the latent after its norm, then the rotary key."""

    latent: Float[Array, "B C LR"]


@dataclass(frozen=True, kw_only=True)
class MLA:
    """q_lora_rank: size of the queries' latent; None where queries are maps of the hidden state.

    scale: of the scores, YaRN's squared mscale included.
    norm: of both latents.
    """

    num_heads: int
    qk_nope_head_dim: int
    rope: Rope
    v_head_dim: int
    kv_lora_rank: int
    q_lora_rank: int | None
    scale: float
    norm: RMSNorm

    @property
    def qk_rope_head_dim(self) -> int:
        return self.rope.rotary_dim

    def tensors(self, hidden: int) -> Tensors:
        queries = self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.q_lora_rank is None:
            tensors = {"q": Tensor(shape=(queries, hidden))}
        else:
            tensors = {
                "q_a": Tensor(shape=(self.q_lora_rank, hidden)),
                "q_a_norm": self.norm.tensor(self.q_lora_rank),
                "q_b": Tensor(shape=(queries, self.q_lora_rank)),
            }
        return tensors | {
            "kv_a": Tensor(shape=(self.kv_lora_rank + self.qk_rope_head_dim, hidden)),
            "kv_a_norm": self.norm.tensor(self.kv_lora_rank),
            "kv_b": Tensor(shape=(self.num_heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank)),
            "o": Tensor(shape=(hidden, self.num_heads * self.v_head_dim)),
        }

    def assemble(self, take: Take) -> MLAWeights:
        q: Array | LatentQuery
        if self.q_lora_rank is None:
            q = take("q")
        else:
            q = LatentQuery(a=take("q_a"), norm=take("q_a_norm"), b=take("q_b"))
        kv_b = take("kv_b").reshape(self.num_heads, self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank)
        return MLAWeights(
            q=q,
            kv_a=take("kv_a"),
            kv_norm=take("kv_a_norm"),
            k_b=kv_b[:, : self.qk_nope_head_dim],
            v_b=kv_b[:, self.qk_nope_head_dim :],
            o=take("o"),
        )

    def init_state(self, batch: int, capacity: int, dtype: np.dtype) -> MLAState:
        return MLAState(jnp.zeros((batch, capacity, self.kv_lora_rank + self.qk_rope_head_dim), dtype))

    def unfit_chunks(self) -> str | None:
        return unfit_sizes(self.kv_lora_rank + self.qk_rope_head_dim, self.kv_lora_rank)

    def workspace_bytes(self, batch: int, length: int, capacity: int) -> int:
        queries = 2 * length * (self.kv_lora_rank + self.qk_rope_head_dim)
        return 4 * batch * self.num_heads * queries + attention_bytes(batch, length, self.num_heads)

    def apply(
        self,
        x: Float[Array, "B T H"],
        state: MLAState,
        positions: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
        weights: MLAWeights,
        implementation: Implementation = "xla",
    ) -> tuple[Float[Array, "B T H"], MLAState]:
        q = self._queries(x, positions, weights)
        latent, key = jnp.split(linear(x, weights.kv_a), [self.kv_lora_rank], axis=-1)
        key = self.rope(key[:, :, None], positions)[:, :, 0]
        new = jnp.concatenate([self.norm(latent, weights.kv_norm), key], axis=-1)
        # What padding writes lies behind every valid position, so it is masked until a later token overwrites it.
        cache = write_barrier(_write(state.latent, new, positions))
        if x.shape[1] == 1:
            mixed = self._attend(q, positions, cache)
        else:
            mixed = self._attend_chunk(q, positions[:, 0], cache, implementation)
        out = einsum("btnl,nvl->btnv", mixed, weights.v_b).astype(x.dtype)
        return linear(out.reshape(*x.shape[:2], -1), weights.o), MLAState(cache)

    def _queries(
        self, x: Float[Array, "B T H"], positions: Int[Array, "B T"], weights: MLAWeights
    ) -> Float[Array, "B T N LR"]:
        """What is multiplied with latent and rotary key."""
        if isinstance(weights.q, LatentQuery):
            q = linear(self.norm(linear(x, weights.q.a), weights.q.norm), weights.q.b)
        else:
            q = linear(x, weights.q)
        nope, rotary = jnp.split(q.reshape(*x.shape[:2], self.num_heads, -1), [self.qk_nope_head_dim], axis=-1)
        absorbed = einsum("btnp,npl->btnl", nope, weights.k_b).astype(x.dtype)
        return jnp.concatenate([absorbed, self.rope(rotary, positions)], axis=-1)

    def _attend_chunk(
        self,
        q: Float[Array, "B T N LR"],
        first_query: Int[Array, " B"],
        cache: Float[Array, "B C LR"],
        implementation: Implementation,
    ) -> Float[Array, "B T N L"]:
        kernel: Implementation = "xla" if self.unfit_chunks() else implementation
        return prompt_attention(
            q.astype(cache.dtype), cache[:, None], None, first_query, jnp.zeros_like(first_query), scale=self.scale,
            value_size=self.kv_lora_rank, implementation=kernel,
        ).astype(q.dtype)  # fmt: skip

    def _attend(
        self, q: Float[Array, "B 1 N LR"], positions: Int[Array, "B 1"], cache: Float[Array, "B C LR"]
    ) -> Float[Array, "B 1 N L"]:
        # In this order of operands and axes: in others XLA:CPU transposes the cache, and for that writes it twice.
        scores = einsum("bcd,btnd->bcnt", cache, q).transpose(0, 2, 3, 1) * self.scale
        visible = jnp.arange(cache.shape[1]) <= positions[:, None, :, None]
        weights = softmax(jnp.where(visible, scores, -jnp.inf)).astype(q.dtype)
        # The rotary keys are summed too and their sum is dropped: to leave them out, XLA would copy the rest first.
        return einsum("bntc,bcd->btnd", weights, cache)[..., : self.kv_lora_rank].astype(q.dtype)


def _write(
    cache: Float[Array, "B C d"], new: Float[Array, "B T d"], positions: Int[Array, "B T"]
) -> Float[Array, "B C d"]:
    """In place under donation. Positions of a row are consecutive."""
    if new.shape[0] == 1:
        return lax.dynamic_update_slice(cache, new.astype(cache.dtype), (0, positions[0, 0], 0))
    rows = jnp.arange(new.shape[0])[:, None]
    return cache.at[rows, positions].set(new.astype(cache.dtype))
