"""What the predictor does around its Mamba2 blocks (paper 5.2): input projections and heads, as pure functions.

`w` is the predictor's plain pytree. Shapes: B sequences, T steps, L layers, E experts, keys = L * E, D `d_model`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.features import NO_TOKEN
from seqmoe_jax.forecast.mamba2 import rms_norm


class Inputs(NamedTuple):
    """What each position reads: the routing before it, and the embedding row and the echo of the token it processes.

    `rows` and `echo` are None where the predictor does not use them.
    """

    features: Float[Array, "B T keys"]
    rows: Int[Array, "B T"] | None = None
    echo: Float[Array, "B T keys"] | None = None


def embed(config: PredictorConfig, w: dict[str, Any], inputs: Inputs, dtype: Any) -> Float[Array, "*B D"]:
    """The residual stream that the first block reads."""
    x: Array = _routing(config, inputs.features, dtype) @ w["in_proj"].astype(dtype) + w["in_bias"].astype(dtype)
    if config.uses_token:
        assert inputs.rows is not None
        x = x + _token_rows(w["token_embed"].astype(dtype), inputs.rows) @ w["token_proj"].astype(dtype)
    if config.uses_echo and inputs.echo is not None:
        found = (inputs.echo.max(-1, keepdims=True) > 0).astype(dtype)
        echo = _routing(config, inputs.echo, dtype) @ w["echo_proj"].astype(dtype)
        x = x + echo + found * w["echo_bias"].astype(dtype)
    return x


def heads(
    config: PredictorConfig, w: dict[str, Any], hidden: Float[Array, "*B D"]
) -> tuple[Float[Array, "*B L E"], Float[Array, "*B L E"]]:
    """Float32 logits: of the coming step (softmax over E) and of retention (a sigmoid per key)."""
    h = rms_norm(hidden, w["norm"])
    shape = (*hidden.shape[:-1], config.layers, config.experts)
    following = (h @ w["next_head"].astype(h.dtype)).astype(jnp.float32) + w["next_bias"].astype(jnp.float32)
    retention = (h @ w["retention_head"].astype(h.dtype)).astype(jnp.float32) + w["retention_bias"].astype(jnp.float32)
    return following.reshape(shape), retention.reshape(shape)


def refine(
    config: PredictorConfig,
    w: dict[str, Any],
    hidden: Float[Array, "*B D"],
    following: Float[Array, "*B L E"],
    known: Float[Array, "*B keys"],
) -> Float[Array, "*B L E"]:
    """The logits `following` of the running step, corrected by the routing of the layers that have run.

    `known` is that routing, zero in the layers still to come.
    """
    dtype = hidden.dtype
    z = hidden + _routing(config, known, dtype) @ w["known_proj"].astype(dtype)
    gate, value = jnp.split(rms_norm(z, w["refine_norm"]) @ w["refine_up"].astype(dtype), 2, axis=-1)
    z = z + (jax.nn.silu(gate) * value) @ w["refine_down"].astype(dtype)
    change: Array = rms_norm(z, w["refine_out_norm"]) @ w["refine_head"].astype(dtype)
    return following + change.astype(jnp.float32).reshape(following.shape)


def membership(w: dict[str, Any], logits: Float[Array, "*B L E"], *, refined: bool = False) -> Float[Array, "*B L E"]:
    """Log-odds that an expert is among the K routed ones, from the logits of a step or its `refined` logits.

    The softmax of the logits is a distribution over experts, as the features are, and a rollout feeds it back. Its
    values sum to 1 per layer. Prefetch and eviction weigh the probability of being routed, which sums to about K. The
    log-odds are a line in the log of the softmax, so both order the experts of a layer alike.
    """
    row = int(refined)
    scale: Array = w["odds_scale"][row].astype(jnp.float32)
    bias: Array = w["odds_bias"][row].astype(jnp.float32)
    return scale[:, None] * jax.nn.log_softmax(logits, axis=-1) + bias[:, None]


def _token_rows(table: Float[Array, "rows width"], rows: Int[Array, "*B"]) -> Float[Array, "*B width"]:
    """`table[rows]`, without a gather of the row that all steps without a token share.

    The gradient of that gather would be thousands of colliding atomic additions on a GPU, which was measured to take
    ten times as long as the whole update.
    """
    unknown = (rows == NO_TOKEN)[..., None]
    known = table.at[jnp.where(rows == NO_TOKEN, table.shape[0], rows)].get(mode="fill", fill_value=0)
    return known + unknown.astype(table.dtype) * table[NO_TOKEN]


def _routing(config: PredictorConfig, features: Float[Array, "*B keys"], dtype: Any) -> Float[Array, "*B keys"]:
    """Routing probabilities as the projections read them."""
    return (features.astype(jnp.float32) ** config.power).astype(dtype)
