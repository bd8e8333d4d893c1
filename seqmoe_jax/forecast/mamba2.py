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

Weights = dict[str, Any]
CONV = 4  # steps that the convolution sees


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """Sizes of a block: width D, inner width `expand` * D in heads of P channels, N state columns."""

    width: int
    expand: int = 2
    head: int = 64
    columns: int = 64

    def __post_init__(self) -> None:
        if self.inner % self.head:
            raise PredictorError(f"expand * width must be a multiple of head {self.head}, got {self.inner}")

    @property
    def inner(self) -> int:
        return self.expand * self.width

    @property
    def heads(self) -> int:
        return self.inner // self.head

    @property
    def convolved(self) -> int:
        return self.inner + 2 * self.columns


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
        inner, heads = config.inner, config.heads
        self.norm = nnx.Param(jnp.ones(config.width))
        self.in_proj = nnx.Param(linear_init(rngs.params(), config.width, inner + config.convolved + heads))
        self.conv = nnx.Param(jax.random.uniform(rngs.params(), (CONV, config.convolved), minval=-0.5, maxval=0.5))
        self.conv_bias = nnx.Param(jnp.zeros(config.convolved))
        # Time constants spread over three decades, decays over one: Mamba2's own initial values.
        spread = jax.random.uniform(rngs.params(), (heads,))
        dt = jnp.exp(math.log(1e-3) + spread * (math.log(1e-1) - math.log(1e-3)))
        self.dt_bias = nnx.Param(dt + jnp.log(-jnp.expm1(-dt)))
        self.log_rate = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (heads,), minval=1.0, maxval=16.0)))
        self.skip = nnx.Param(jnp.ones(heads))
        self.gate_norm = nnx.Param(jnp.ones(inner))
        self.out_proj = nnx.Param(linear_init(rngs.params(), inner, config.width, 0.5))

    def weights(self) -> Weights:
        return {name: variable[...] for name, variable in vars(self).items() if isinstance(variable, nnx.Param)}

    def chunked(
        self, x: Float[Array, "B T D"], valid: Bool[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T D"], Weights]:
        """Output of every step and the recurrent state after the last valid one (valid steps come first)."""
        return block_chunk(self.weights(), x, init_state(self.config, x.shape[0], x.dtype), self.config, valid)


def init_state(config: Mamba2Config, batch: int, dtype: Any = jnp.float32) -> Weights:
    """The state before any step: `conv` [B, 3, inner + 2N], `ssm` [B, H, P, N] in float32."""
    return {
        "conv": jnp.zeros((batch, CONV - 1, config.convolved), dtype),
        "ssm": jnp.zeros((batch, config.heads, config.head, config.columns), jnp.float32),
    }


def block_step(
    w: Weights, x: Float[Array, "B D"], state: Weights, config: Mamba2Config
) -> tuple[Float[Array, "B D"], Weights]:
    """One step of a block, recurrent form. `w` may be of any float type; activations keep theirs."""
    cast = {name: value.astype(x.dtype) for name, value in w.items()}
    z, mixed, dt = _project(cast, x, config)
    convolved, tail = conv_step(mixed, cast["conv"], cast["conv_bias"], state["conv"])
    values, b, c = _split(convolved, config)
    rate = -jnp.exp(w["log_rate"].astype(jnp.float32))
    y, ssm = ssd_step(values, _time_step(w, dt), rate, b, c, state["ssm"])
    y = (y + values * cast["skip"][:, None]).reshape(x.shape[0], -1)
    out = x + rms_norm(y * jax.nn.silu(z), cast["gate_norm"]) @ cast["out_proj"]
    return out, {"conv": tail, "ssm": ssm}


def block_chunk(
    w: Weights,
    x: Float[Array, "B T D"],
    state: Weights,
    config: Mamba2Config,
    valid: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], Weights]:
    """T steps of a block from a state on, chunked form; where `valid` (which comes first) is false, none is taken."""
    cast = {name: value.astype(x.dtype) for name, value in w.items()}
    batch, steps, _ = x.shape
    z, mixed, dt = _project(cast, x, config)
    values, b, c = _split(causal_conv(mixed, cast["conv"], cast["conv_bias"], state["conv"]), config)
    dt = _time_step(w, dt)
    if valid is not None:
        dt = jnp.where(valid[..., None], dt, 0)
    y, ssm = ssd_chunked(values, dt, -jnp.exp(w["log_rate"].astype(jnp.float32)), b, c, state["ssm"])
    y = y + values * cast["skip"][:, None]
    out = x + rms_norm(y.reshape(batch, steps, -1) * jax.nn.silu(z), cast["gate_norm"]) @ cast["out_proj"]
    length = jnp.full(batch, steps) if valid is None else valid.sum(1)
    inputs = jnp.concatenate([state["conv"].astype(mixed.dtype), mixed], axis=1)
    last = length[:, None] + jnp.arange(CONV - 1)
    tail = jnp.take_along_axis(inputs, last[..., None], axis=1)
    return out, {"conv": tail, "ssm": ssm}


def _project(w: Weights, x: Array, config: Mamba2Config) -> tuple[Array, Array, Array]:
    projected = rms_norm(x, w["norm"]) @ w["in_proj"]
    edges = [config.inner, config.inner + config.convolved]
    z, mixed, dt = jnp.split(projected, edges, axis=-1)
    return z, mixed, dt


def _split(convolved: Array, config: Mamba2Config) -> tuple[Array, Array, Array]:
    """x as heads, B, C of the convolved channels."""
    x, b, c = jnp.split(convolved, [config.inner, config.inner + config.columns], axis=-1)
    return x.reshape(*x.shape[:-1], config.heads, config.head), b, c


def _time_step(w: Weights, dt: Array) -> Array:
    return jax.nn.softplus(dt.astype(jnp.float32) + w["dt_bias"].astype(jnp.float32))
