"""MLPs that every token passes: dense layers, and the shared expert beside the routed ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arithmetic import linear
from pallas_kernels.layout import SWIGLU, Activation
from seqmoe_jax.models.tensors import Take, Tensor, Tensors


class DenseWeights(NamedTuple):
    gate_up: Float[Array, "FF H"]
    down: Float[Array, "H F"]


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """A SwiGLU MLP of `width`: down(silu(gate x) * up x), with the clamps of its activation."""

    width: int
    activation: Activation = SWIGLU

    def tensors(self, hidden: int) -> Tensors:
        return {
            "gate": Tensor(shape=(self.width, hidden)),
            "up": Tensor(shape=(self.width, hidden)),
            "down": Tensor(shape=(hidden, self.width)),
        }

    def assemble(self, take: Take) -> DenseWeights:
        return DenseWeights(gate_up=take("gate", "up"), down=take("down"))

    def __call__(self, x: Float[Array, "*batch H"], weights: DenseWeights) -> Float[Array, "*batch H"]:
        """Rounded after the silu and after the product, as transformers does."""
        gate, up = jnp.split(linear(x, weights.gate_up), 2, axis=-1)
        limit = self.activation.limit
        if limit is not None:
            gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return linear(jax.nn.silu(gate.astype(jnp.float32)).astype(x.dtype) * up, weights.down)


class SharedWeights(NamedTuple):
    mlp: DenseWeights
    gate: Float[Array, "1 H"] | None


@dataclass(frozen=True, kw_only=True)
class SharedSpec:
    """The expert that every token passes; where `gated`, a sigmoid of its own linear map weighs it."""

    mlp: DenseSpec
    gated: bool

    def tensors(self, hidden: int) -> Tensors:
        tensors = self.mlp.tensors(hidden)
        if self.gated:
            tensors["weight"] = Tensor(shape=(1, hidden))
        return tensors

    def assemble(self, take: Take) -> SharedWeights:
        return SharedWeights(mlp=self.mlp.assemble(take), gate=take("weight") if self.gated else None)

    def __call__(self, x: Float[Array, "*batch H"], weights: SharedWeights) -> Float[Array, "*batch H"]:
        y = self.mlp(x, weights.mlp)
        return y if weights.gate is None else jax.nn.sigmoid(linear(x, weights.gate)) * y
