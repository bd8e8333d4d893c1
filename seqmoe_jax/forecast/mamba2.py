"""A Mamba2 block with residual: chunked for training and prefill, recurrent for one step (paper 5.2).

norm -> in-projection to (z, x, B, C, dt) -> causal convolution of x, B, C -> SSD -> gated norm -> out-projection.
`block_step` and `block_chunk` are pure functions of the block's weights: the runtime never touches an NNX object.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from seqmoe_jax.errors import PredictorError
from seqmoe_jax.forecast.ssd import causal_conv, conv_step, ssd_chunked, ssd_step

BlockWeights = dict[str, Any]
D_CONV = 4  # steps that the convolution sees, the current one and three before it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """Sizes of a block, named as in Mamba2's public implementation; D is `d_model`, P `head_dim`, N `d_state`."""

    d_model: int
    expand: int = 2
    head_dim: int = 64
    d_state: int = 64

    def __post_init__(self) -> None:
        if self.d_inner % self.head_dim:
            raise PredictorError(f"expand * d_model must be a multiple of head_dim {self.head_dim}, got {self.d_inner}")

    @property
    def d_inner(self) -> int:
        return self.expand * self.d_model

    @property
    def num_heads(self) -> int:
        return self.d_inner // self.head_dim

    @property
    def conv_dim(self) -> int:
        return self.d_inner + 2 * self.d_state


def rms_norm(x: Float[Array, "*B D"], scale: Float[Array, " D"]) -> Float[Array, "*B D"]:
    """Root-mean-square norm, computed in float32."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def linear_init(key: Array, rows: int, columns: int, gain: float = 1.0) -> Float[Array, "rows columns"]:
    """Normal weights that keep the variance of unit input, times `gain` squared."""
    return jax.random.normal(key, (rows, columns)) * (gain / math.sqrt(rows))


class Mamba2(nnx.Module):
    """One block. `chunked` runs whole sequences; `block_step` and `block_chunk` run on the same weights."""

    def __init__(self, config: Mamba2Config, *, rngs: nnx.Rngs):
        self.config = config
        inner, heads = config.d_inner, config.num_heads
        self.norm = nnx.Param(jnp.ones(config.d_model))
        self.in_proj = nnx.Param(linear_init(rngs.params(), config.d_model, inner + config.conv_dim + heads))
        self.conv = nnx.Param(jax.random.uniform(rngs.params(), (D_CONV, config.conv_dim), minval=-0.5, maxval=0.5))
        self.conv_bias = nnx.Param(jnp.zeros(config.conv_dim))
        # Time constants spread over three decades, decays over one: Mamba2's own initial values.
        spread = jax.random.uniform(rngs.params(), (heads,))
        dt = jnp.exp(math.log(1e-3) + spread * (math.log(1e-1) - math.log(1e-3)))
        self.dt_bias = nnx.Param(dt + jnp.log(-jnp.expm1(-dt)))
        self.A_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (heads,), minval=1.0, maxval=16.0)))
        self.D = nnx.Param(jnp.ones(heads))
        self.gate_norm = nnx.Param(jnp.ones(inner))
        self.out_proj = nnx.Param(linear_init(rngs.params(), inner, config.d_model, 0.5))

    def weights(self) -> BlockWeights:
        return {name: variable[...] for name, variable in vars(self).items() if isinstance(variable, nnx.Param)}

    def chunked(
        self, x: Float[Array, "B T D"], valid: Bool[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T D"], BlockWeights]:
        """Output of every step and the recurrent state after the last valid one (valid steps come first)."""
        return block_chunk(self.weights(), x, init_state(self.config, x.shape[0], x.dtype), self.config, valid)


def init_state(config: Mamba2Config, batch: int, dtype: Any = jnp.float32) -> BlockWeights:
    """The state before any step: `conv` [B, 3, inner + 2N], `ssm` [B, H, P, N] in float32."""
    return {
        "conv": jnp.zeros((batch, D_CONV - 1, config.conv_dim), dtype),
        "ssm": jnp.zeros((batch, config.num_heads, config.head_dim, config.d_state), jnp.float32),
    }


def block_step(
    w: BlockWeights, x: Float[Array, "B D"], state: BlockWeights, config: Mamba2Config
) -> tuple[Float[Array, "B D"], BlockWeights]:
    """One step of a block, recurrent form. `w` may be of any float type; activations keep theirs."""
    cast = {name: value.astype(x.dtype) for name, value in w.items()}
    z, xbc, dt = _project(cast, x, config)
    convolved, tail = conv_step(xbc, cast["conv"], cast["conv_bias"], state["conv"])
    values, B, C = _split(convolved, config)
    A = -jnp.exp(w["A_log"].astype(jnp.float32))
    y, ssm = ssd_step(values, _time_step(w, dt), A, B, C, state["ssm"])
    y = (y + values * cast["D"][:, None]).reshape(x.shape[0], -1)
    out = x + rms_norm(y * jax.nn.silu(z), cast["gate_norm"]) @ cast["out_proj"]
    return out, {"conv": tail, "ssm": ssm}


def block_chunk(
    w: BlockWeights,
    x: Float[Array, "B T D"],
    state: BlockWeights,
    config: Mamba2Config,
    valid: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], BlockWeights]:
    """T steps of a block from a state on, chunked form; where `valid` (which comes first) is false, none is taken."""
    cast = {name: value.astype(x.dtype) for name, value in w.items()}
    batch, steps, _ = x.shape
    z, xbc, dt = _project(cast, x, config)
    values, B, C = _split(causal_conv(xbc, cast["conv"], cast["conv_bias"], state["conv"]), config)
    dt = _time_step(w, dt)
    if valid is not None:
        dt = jnp.where(valid[..., None], dt, 0)
    y, ssm = ssd_chunked(values, dt, -jnp.exp(w["A_log"].astype(jnp.float32)), B, C, state["ssm"])
    y = y + values * cast["D"][:, None]
    out = x + rms_norm(y.reshape(batch, steps, -1) * jax.nn.silu(z), cast["gate_norm"]) @ cast["out_proj"]
    length = jnp.full(batch, steps) if valid is None else valid.sum(1)
    inputs = jnp.concatenate([state["conv"].astype(xbc.dtype), xbc], axis=1)
    last = length[:, None] + jnp.arange(D_CONV - 1)
    tail = jnp.take_along_axis(inputs, last[..., None], axis=1)
    return out, {"conv": tail, "ssm": ssm}


def _project(w: BlockWeights, x: Array, config: Mamba2Config) -> tuple[Array, Array, Array]:
    projected = rms_norm(x, w["norm"]) @ w["in_proj"]
    edges = [config.d_inner, config.d_inner + config.conv_dim]
    z, xbc, dt = jnp.split(projected, edges, axis=-1)
    return z, xbc, dt


def _split(convolved: Array, config: Mamba2Config) -> tuple[Array, Array, Array]:
    """x as heads, B, C of the convolved channels."""
    x, B, C = jnp.split(convolved, [config.d_inner, config.d_inner + config.d_state], axis=-1)
    return x.reshape(*x.shape[:-1], config.num_heads, config.head_dim), B, C


def _time_step(w: BlockWeights, dt: Array) -> Array:
    return jax.nn.softplus(dt.astype(jnp.float32) + w["dt_bias"].astype(jnp.float32))
