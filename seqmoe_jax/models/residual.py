"""How a sub-layer's result joins the stream of hidden states: added, or through hyper-connections.

Manifold-constrained hyper-connections (mHC, arXiv 2512.24880; DeepSeek-V4): a token has S streams. A sub-layer reads
a weighted sum of them, its result is added to each with a weight, and a doubly stochastic matrix mixes them; all
weights are functions of the streams. Shapes: B sequences, T positions, S streams, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from pallas_kernels.arithmetic import einsum
from seqmoe_jax.models.tensors import FLOAT32, Take, Tensor, Tensors


@runtime_checkable
class Residual(Protocol):
    """The interface of residuals. `weights` are what `assemble` gives, `mixing` is what `enter` hands on to `leave`."""

    def tensors(self, hidden: int) -> Tensors:
        """Its tensors by canonical name, as checkpoints hold them."""

    def assemble(self, take: Take) -> Any:
        """Its weights, from the tensors by canonical name."""

    def enter(self, x: Float[Array, "B T *S H"], weights: Any) -> tuple[Float[Array, "B T H"], Any]:
        """What the sub-layer reads of the stream or streams."""

    def leave(self, x: Float[Array, "B T *S H"], y: Float[Array, "B T H"], mixing: Any) -> Float[Array, "B T *S H"]:
        """The stream or streams with the sub-layer's result."""


class HyperWeights(NamedTuple):
    map: Float32[Array, "M SH"]
    base: Float32[Array, " M"]
    scale: Float32[Array, " m"]

    def __call__(self, x: Float[Array, "B T S H"], eps: float) -> Float32[Array, "B T M"]:
        """The map of the normed streams, without scale and base."""
        flat = x.reshape(*x.shape[:2], -1).astype(jnp.float32)
        return einsum("btd,md->btm", flat * lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + eps), self.map)


class Mixing(NamedTuple):
    """What `enter` hands on to `leave`: the weight of the result for each stream, and the matrix that mixes streams."""

    post: Float32[Array, "B T S"]
    streams: Float32[Array, "B T S S"]


@dataclass(frozen=True, kw_only=True)
class Add:
    """x + scale * y."""

    scale: float = 1.0

    def tensors(self, hidden: int) -> Tensors:
        return {}

    def assemble(self, take: Take) -> None:
        return None

    def enter(self, x: Float[Array, "B T H"], weights: None) -> tuple[Float[Array, "B T H"], None]:
        return x, None

    def leave(self, x: Float[Array, "B T H"], y: Float[Array, "B T H"], mixing: None) -> Float[Array, "B T H"]:
        return x + y if self.scale == 1 else x + y * jnp.asarray(self.scale, x.dtype)


@dataclass(frozen=True, kw_only=True)
class HyperConnection:
    """Hyper-connections of `streams` hidden states per token (hc_mult).

    iterations: how often rows and columns are normalised in turn (Sinkhorn and Knopp; hc_sinkhorn_iters).
    eps: is added to every divisor and gate.
    """

    streams: int
    iterations: int
    eps: float
    norm_eps: float

    def tensors(self, hidden: int) -> Tensors:
        rows = self.streams * (2 + self.streams)
        return {
            "map": Tensor(shape=(rows, self.streams * hidden), dtype=FLOAT32),
            "base": Tensor(shape=(rows,), init="zeros", dtype=FLOAT32),
            "scale": Tensor(shape=(3,), init="ones", dtype=FLOAT32),
        }

    def assemble(self, take: Take) -> HyperWeights:
        return HyperWeights(map=take("map"), base=take("base"), scale=take("scale"))

    def enter(self, x: Float[Array, "B T S H"], weights: HyperWeights) -> tuple[Float[Array, "B T H"], Mixing]:
        """What the sub-layer reads, and what `leave` needs."""
        s = self.streams
        scale = jnp.repeat(weights.scale, jnp.array([s, s, s * s]), total_repeat_length=s * (2 + s))
        pre, post, between = jnp.split(weights(x, self.norm_eps) * scale + weights.base, [s, 2 * s], axis=-1)
        y = _weighted_sum(x, jax.nn.sigmoid(pre) + self.eps)
        return y, Mixing(2 * jax.nn.sigmoid(post), self._doubly_stochastic(between.reshape(*pre.shape, s)))

    def _doubly_stochastic(self, logits: Float32[Array, "B T S S"]) -> Float32[Array, "B T S S"]:
        def columns(c: Float32[Array, "B T S S"]) -> Float32[Array, "B T S S"]:
            return c / (c.sum(axis=-2, keepdims=True) + self.eps)

        def both(_: Any, c: Float32[Array, "B T S S"]) -> Float32[Array, "B T S S"]:
            return columns(c / (c.sum(axis=-1, keepdims=True) + self.eps))

        start = columns(jax.nn.softmax(logits, axis=-1) + self.eps)
        return lax.fori_loop(0, self.iterations - 1, both, start)

    def leave(self, x: Float[Array, "B T S H"], y: Float[Array, "B T H"], mixing: Mixing) -> Float[Array, "B T S H"]:
        """Stream k becomes post_k y + sum_j streams[j, k] x_j: the matrix is used transposed."""
        mixed = einsum("btjk,btjh->btkh", mixing.streams.astype(x.dtype), x).astype(x.dtype)
        return mixing.post.astype(x.dtype)[..., None] * y[:, :, None] + mixed


@dataclass(frozen=True, kw_only=True)
class HyperHead:
    """The sum of streams that the model's last norm reads."""

    streams: int
    eps: float
    norm_eps: float

    def tensors(self, hidden: int) -> Tensors:
        return {
            "map": Tensor(shape=(self.streams, self.streams * hidden), dtype=FLOAT32),
            "base": Tensor(shape=(self.streams,), init="zeros", dtype=FLOAT32),
            "scale": Tensor(shape=(1,), init="ones", dtype=FLOAT32),
        }

    def assemble(self, take: Take) -> HyperWeights:
        return HyperWeights(map=take("map"), base=take("base"), scale=take("scale"))

    def __call__(self, x: Float[Array, "B T S H"], weights: HyperWeights) -> Float[Array, "B T H"]:
        gates = jax.nn.sigmoid(weights(x, self.norm_eps) * weights.scale + weights.base) + self.eps
        return _weighted_sum(x, gates)


def _weighted_sum(x: Float[Array, "B T S H"], gates: Float32[Array, "B T S"]) -> Float[Array, "B T H"]:
    return (gates[..., None] * x.astype(jnp.float32)).sum(axis=2).astype(x.dtype)


PLAIN = Add()
