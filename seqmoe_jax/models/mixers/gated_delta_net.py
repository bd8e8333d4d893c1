"""Gated delta net: linear attention whose memory forgets by a learned rate and overwrites by the delta rule.

Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464); the token mixer of three layers of four in
Qwen3-Next and Qwen3.5/3.6. Per value head, with a memory M of keys by values:

    M <- exp(g) M;   d = beta (v - M^T k);   M <- M + k d^T;   o = M^T q

Shapes: G key heads of size K (num_k_heads, head_k_dim), N value heads of size V (num_v_heads, head_v_dim), where N is a
multiple of G; W the causal convolution's kernel size, C = 2 G K + N V its channels (conv_dim).
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
from pallas_kernels.backend import Implementation
from seqmoe_jax.models import ring
from seqmoe_jax.models.norms import RMSNorm
from seqmoe_jax.models.tensors import FLOAT32, Take, Tensor, Tensors

CHUNK = 64  # tokens of a prompt whose deltas are solved for at once
L2_NORM_EPS = 1e-6  # added to the squared length of queries and keys before they are divided by their length


class GatedDeltaNetWeights(NamedTuple):
    """Rows of `qkv` are all queries, all keys, all values; rows of `ba` are the N betas, then the N decays."""

    qkv: Float[Array, "C H"]
    z: Float[Array, "NV H"]
    ba: Float[Array, "BA H"]
    conv: Float[Array, "C W"]
    A_log: Float32[Array, " N"]
    dt_bias: Float32[Array, " N"]
    norm: Float32[Array, " V"]
    out: Float[Array, "H NV"]


class GatedDeltaNetState(NamedTuple):
    """The state does not grow with the sequence. It cannot be rolled back."""

    conv: Float[Array, "B W C"]  # a ring of the convolution's last inputs
    recurrent: Float32[Array, "B N K V"]  # the memory M of every value head


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet:
    """Value head h reads key head h // (N / G).

    conv_kernel_size: how many tokens the causal convolution sees, the current one included.
    norm: normalises the outputs of each value head; its weight multiplies as it is, even where the model's other norms
        are zero-centred.
    grouped: files hold the projections by key head, with its queries, keys, values and gates together (Qwen3-Next).
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel_size: int
    norm: RMSNorm
    grouped: bool = False

    @property
    def conv_dim(self) -> int:
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim

    def tensors(self, hidden: int) -> Tensors:
        n, values = self.num_v_heads, self.num_v_heads * self.head_v_dim
        if self.grouped:
            tensors = {"qkvz": Tensor(shape=(self.conv_dim + values, hidden)), "ba": Tensor(shape=(2 * n, hidden))}
        else:
            rows = {"qkv": self.conv_dim, "z": values, "b": n, "a": n}
            tensors = {name: Tensor(shape=(size, hidden)) for name, size in rows.items()}
        return tensors | {
            "conv": Tensor(shape=(self.conv_dim, 1, self.conv_kernel_size)),
            "A_log": Tensor(shape=(n,), init="zeros", dtype=FLOAT32),
            "dt_bias": Tensor(shape=(n,), init="zeros", dtype=FLOAT32),
            "norm": Tensor(shape=(self.head_v_dim,), init="ones", dtype=FLOAT32),
            "out": Tensor(shape=(hidden, values)),
        }

    def assemble(self, take: Take) -> GatedDeltaNetWeights:
        if self.grouped:
            k, v = self.head_k_dim, self.num_v_heads // self.num_k_heads * self.head_v_dim
            q, key, value, z = _ungroup(take("qkvz"), self.num_k_heads, k, k, v, v)
            b, a = _ungroup(take("ba"), self.num_k_heads, *[self.num_v_heads // self.num_k_heads] * 2)
            qkv, ba = jnp.concatenate([q, key, value]), jnp.concatenate([b, a])
        else:
            qkv, z, ba = take("qkv"), take("z"), take("b", "a")
        return GatedDeltaNetWeights(
            qkv=qkv,
            z=z,
            ba=ba,
            conv=take("conv")[:, 0],
            A_log=take("A_log"),
            dt_bias=take("dt_bias"),
            norm=take("norm"),
            out=take("out"),
        )

    def init_state(self, batch: int, capacity: int, dtype: np.dtype) -> GatedDeltaNetState:
        return GatedDeltaNetState(
            conv=jnp.zeros((batch, self.conv_kernel_size, self.conv_dim), dtype),
            recurrent=jnp.zeros((batch, self.num_v_heads, self.head_k_dim, self.head_v_dim), jnp.float32),
        )

    def unfit_chunks(self) -> str | None:
        return "no kernel for gated delta nets"

    def workspace_bytes(self, batch: int, length: int, capacity: int) -> int:
        # Per token in float32: channels before and after convolution, and per value head the rows that are solved
        # for with their right side, faded queries and keys, outputs, and three rows of a chunk's square matrices.
        per_head = 4 * (self.head_k_dim + self.head_v_dim) + 3 * CHUNK
        return 4 * batch * length * (3 * self.conv_dim + self.num_v_heads * per_head)

    def apply(
        self,
        x: Float[Array, "B T H"],
        state: GatedDeltaNetState,
        positions: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
        weights: GatedDeltaNetWeights,
        implementation: Implementation = "xla",
    ) -> tuple[Float[Array, "B T H"], GatedDeltaNetState]:
        batch, length, _ = x.shape
        g, n, dk, dv = self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim
        mixed, conv = _convolve(linear(x, weights.qkv), state.conv, positions, valid, weights.conv)
        q, k, v = jnp.split(mixed.astype(jnp.float32), [g * dk, 2 * g * dk], axis=-1)

        def l2_norm(heads: Float32[Array, "B T GK"]) -> Float32[Array, "B T N K"]:
            heads = heads.reshape(batch, length, g, dk)
            heads = heads * lax.rsqrt((heads * heads).sum(axis=-1, keepdims=True) + L2_NORM_EPS)
            return jnp.repeat(heads, n // g, axis=2)

        b, a = jnp.split(linear(x, weights.ba), 2, axis=-1)
        log_decay = -jnp.exp(weights.A_log) * jax.nn.softplus(a.astype(jnp.float32) + weights.dt_bias)
        beta = jax.nn.sigmoid(b).astype(jnp.float32)
        keep = valid[..., None]
        rule = recurrent_gated_delta_rule if length == 1 else chunk_gated_delta_rule
        out, memory = rule(
            l2_norm(q) * dk**-0.5,
            l2_norm(k),
            v.reshape(batch, length, n, dv),
            jnp.where(keep, log_decay, 0),
            jnp.where(keep, beta, 0),
            state.recurrent,
        )
        z = linear(x, weights.z).reshape(batch, length, n, dv).astype(jnp.float32)
        normed = self.norm(out.astype(x.dtype), weights.norm).astype(jnp.float32)
        gated = (normed * jax.nn.silu(z)).astype(x.dtype)
        return linear(gated.reshape(batch, length, n * dv), weights.out), GatedDeltaNetState(conv, memory)


def _ungroup(rows: Float[Array, "R H"], groups: int, *sizes: int) -> list[Float[Array, "r H"]]:
    """Rows that lie group by group, `sizes` of each kind in every group, as one matrix per kind."""
    parts = jnp.split(rows.reshape(groups, -1, rows.shape[-1]), np.cumsum(sizes)[:-1], axis=1)
    return [part.reshape(-1, rows.shape[-1]) for part in parts]


def _convolve(
    u: Float[Array, "B T C"],
    past: Float[Array, "B W C"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    kernel: Float[Array, "C W"],
) -> tuple[Float[Array, "B T C"], Float[Array, "B W C"]]:
    """Depthwise causal convolution and silu: silu(sum_j kernel[:, j] u[t - W + 1 + j]), zeros before the start."""
    width, length = past.shape[1], u.shape[1]
    new = ring.push(past, u, positions, valid)
    taps = kernel.T.astype(jnp.float32)
    if length == 1:
        # Slot s holds the input of (position - s) mod W tokens ago. Rolling the taps is cheaper than rolling the ring.
        age = (positions - jnp.arange(width)) % width
        out = (taps[width - 1 - age] * new.astype(jnp.float32)).sum(axis=1, keepdims=True)
    else:
        stream = jnp.concatenate([ring.ordered(past, positions[:, 0])[:, 1:], u], axis=1).astype(jnp.float32)
        out = taps[0] * stream[:, :length]
        for j in range(1, width):
            out = out + taps[j] * stream[:, j : j + length]
    return jax.nn.silu(out).astype(u.dtype), new


def recurrent_gated_delta_rule(
    q: Float32[Array, "B 1 N K"],
    k: Float32[Array, "B 1 N K"],
    v: Float32[Array, "B 1 N V"],
    log_decay: Float32[Array, "B 1 N"],
    beta: Float32[Array, "B 1 N"],
    memory: Float32[Array, "B N K V"],
) -> tuple[Float32[Array, "B 1 N V"], Float32[Array, "B N K V"]]:
    """The rule for one token. Memory is read once (for k and q together) and written once, in place."""
    decay = jnp.exp(log_decay[:, 0])[..., None]
    both = jnp.stack([k[:, 0], q[:, 0]], axis=2)
    at_k, at_q = jnp.moveaxis(decay[:, :, None] * einsum("bnik,bnkv->bniv", both, memory), 2, 0)
    d = beta[:, 0, :, None] * (v[:, 0] - at_k)
    out = at_q + (k[:, 0] * q[:, 0]).sum(axis=-1, keepdims=True) * d
    memory = decay[..., None] * memory + k[:, 0, :, :, None] * d[:, :, None, :]
    return out[:, None], memory


def chunk_gated_delta_rule(
    q: Float32[Array, "B T N K"],
    k: Float32[Array, "B T N K"],
    v: Float32[Array, "B T N V"],
    log_decay: Float32[Array, "B T N"],
    beta: Float32[Array, "B T N"],
    memory: Float32[Array, "B N K V"],
) -> tuple[Float32[Array, "B T N V"], Float32[Array, "B N K V"]]:
    """The rule for T tokens, `CHUNK` at a time: within a chunk a triangular system, between chunks the memory.

    With G the decays summed from the chunk's start and L_ij = exp(G_i - G_j) for i >= j: the rows d of a chunk solve
    (I + strict_lower(beta K K^T L)) d = beta (V - exp(G) K M) (arXiv 2412.06464, section 3.3).
    """
    length = q.shape[1]
    size = min(CHUNK, length)
    padding = -length % size

    def split(array: Float32[Array, "B T N ..."]) -> Float32[Array, "n B N c ..."]:
        # Padding neither decays (log 1) nor writes (beta 0).
        array = jnp.pad(array, [(0, 0), (0, padding)] + [(0, 0)] * (array.ndim - 2))
        array = array.reshape(array.shape[0], -1, size, *array.shape[2:])
        return jnp.moveaxis(array, (1, 3), (0, 2))

    q, k, v, log_decay, beta = map(split, (q, k, v, log_decay, beta))
    total = jnp.cumsum(log_decay, axis=-1)
    lower = jnp.tril(jnp.ones((size, size), bool))
    # Masked before the exponential, which would overflow above the diagonal.
    fade = jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], -jnp.inf))
    system = beta[..., None] * einsum("cbnik,cbnjk->cbnij", k, k) * fade
    rhs = beta[..., None] * jnp.concatenate([v, jnp.exp(total)[..., None] * k], axis=-1)
    solved = lax.linalg.triangular_solve(system, rhs, left_side=True, lower=True, unit_diagonal=True)
    written, read = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    scores = einsum("cbnik,cbnjk->cbnij", q, k) * fade
    q_faded = q * jnp.exp(total)[..., None]
    k_faded = k * jnp.exp(total[..., -1:] - total)[..., None]
    kept = jnp.exp(total[..., -1])[..., None, None]

    def one(memory: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        written, read, scores, q_faded, k_faded, kept = chunk
        d = written - einsum("bnik,bnkv->bniv", read, memory)
        out = einsum("bnik,bnkv->bniv", q_faded, memory) + einsum("bnij,bnjv->bniv", scores, d)
        return kept * memory + einsum("bnik,bniv->bnkv", k_faded, d), out

    memory, out = lax.scan(one, memory, (written, read, scores, q_faded, k_faded, kept))
    out = jnp.moveaxis(out, (0, 2), (1, 3))
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :length], memory
