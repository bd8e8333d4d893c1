"""Structured state-space duality (Mamba2): the same recurrence in chunked and in recurrent form.

For every head, with decay a = exp(dt * A):  S_t = a_t S_{t-1} + dt_t x_t B_t^T,  y_t = S_t C_t.
Shapes: B sequences, T steps, H heads of P channels, state size N (`d_state`); B and C are shared by all heads (one
group). In the chunked form, c chunks of Q steps.
Dao and Gu 2024, section 6: within a chunk the recurrence is a masked matrix product, between chunks it is a scan.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def ssd_chunked(
    x: Float[Array, "B T H P"],
    dt: Float[Array, "B T H"],
    A: Float[Array, " H"],
    B: Float[Array, "B T N"],
    C: Float[Array, "B T N"],
    state: Float[Array, "B H P N"] | None = None,
    chunk: int = 64,
) -> tuple[Float[Array, "B T H P"], Float[Array, "B H P N"]]:
    """Outputs and the state after the last step. `A` is negative; a step with dt = 0 leaves the state alone."""
    batch, steps, heads, channels = x.shape
    d_state = B.shape[-1]
    chunk = min(chunk, steps)
    padding = -steps % chunk
    if padding:
        x, dt, B, C = (jnp.pad(array, ((0, 0), (0, padding)) + ((0, 0),) * (array.ndim - 2)) for array in (x, dt, B, C))
    count = (steps + padding) // chunk
    x, dt, B, C = (array.reshape(batch, count, chunk, *array.shape[2:]) for array in (x, dt, B, C))
    # Decays are products of many factors: float32, whatever the activations are.
    log_decay = jnp.cumsum(dt.astype(jnp.float32) * A.astype(jnp.float32), axis=2)  # [B, c, Q, H]
    by_head = jnp.moveaxis(log_decay, -1, 2)  # [B, c, H, Q]
    between = by_head[..., :, None] - by_head[..., None, :]
    causal = jnp.tril(jnp.ones((chunk, chunk), bool))
    decay = jnp.exp(jnp.where(causal, between, -jnp.inf)).astype(x.dtype)  # [B, c, H, Q, Q]
    scaled = x * dt[..., None].astype(x.dtype)
    mixing = jnp.einsum("bcin,bcjn->bcij", C, B)[:, :, None] * decay
    inside = jnp.einsum("bchij,bcjhp->bcihp", mixing, scaled)

    to_end = jnp.exp(by_head[..., -1:] - by_head).astype(x.dtype)  # [B, c, H, Q]
    added = jnp.einsum("bcjn,bchj,bcjhp->bchpn", B, to_end, scaled).astype(jnp.float32)
    kept = jnp.exp(by_head[..., -1])  # [B, c, H]
    if state is None:
        state = jnp.zeros((batch, heads, channels, d_state), jnp.float32)

    def pass_on(carry: Array, of_chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        factor, increment = of_chunk
        return carry * factor[..., None, None] + increment, carry

    final, before = lax.scan(pass_on, state.astype(jnp.float32), (jnp.moveaxis(kept, 1, 0), jnp.moveaxis(added, 1, 0)))
    before = jnp.moveaxis(before, 0, 1).astype(x.dtype)  # [B, c, H, P, N]
    from_start = jnp.exp(log_decay).astype(x.dtype)
    carried = jnp.einsum("bcin,bchpn,bcih->bcihp", C, before, from_start)
    y = (inside + carried).reshape(batch, count * chunk, heads, channels)
    return y[:, :steps], final


def ssd_step(
    x: Float[Array, "B H P"],
    dt: Float[Array, "B H"],
    A: Float[Array, " H"],
    B: Float[Array, "B N"],
    C: Float[Array, "B N"],
    state: Float[Array, "B H P N"],
) -> tuple[Float[Array, "B H P"], Float[Array, "B H P N"]]:
    """One step of the recurrence."""
    decay = jnp.exp(dt.astype(jnp.float32) * A.astype(jnp.float32))
    added = jnp.einsum("bhp,bn->bhpn", x * dt[..., None].astype(x.dtype), B)
    state = state * decay[..., None, None] + added.astype(jnp.float32)
    return jnp.einsum("bhpn,bn->bhp", state, C.astype(jnp.float32)).astype(x.dtype), state


def causal_conv(
    x: Float[Array, "B T D"], weight: Float[Array, "W D"], bias: Float[Array, " D"], tail: Float[Array, "B V D"]
) -> Float[Array, "B T D"]:
    """Depthwise convolution over each step and the V = W - 1 before it; `tail` holds those before the first."""
    width = weight.shape[0]
    padded = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    taps = [padded[:, tap : tap + x.shape[1]] * weight[tap] for tap in range(width)]
    return jax.nn.silu(sum(taps[1:], start=taps[0]) + bias)


def conv_step(
    x: Float[Array, "B D"], weight: Float[Array, "W D"], bias: Float[Array, " D"], tail: Float[Array, "B V D"]
) -> tuple[Float[Array, "B D"], Float[Array, "B V D"]]:
    """One step; `tail` holds the V = W - 1 inputs before it."""
    window = jnp.concatenate([tail, x[:, None].astype(tail.dtype)], axis=1)
    return jax.nn.silu(jnp.einsum("bwd,wd->bd", window.astype(x.dtype), weight) + bias), window[:, 1:]
