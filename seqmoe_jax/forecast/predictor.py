"""The predictor: routing of all layers and the coming token in, forecasts of the coming steps out (paper 5.2, 5.3).

in-projections -> Mamba2 blocks -> three heads: which experts the coming step uses; how soon each is used after it
(retention); and, once that step has run its first layers, a refined forecast of the rest.

Position t of a sequence reads the routing of step t - 1 (zeros at the start) and the token that step t will process,
and forecasts step t. Executions: `__call__` for training and prefill, `plain.step` for one step, `plain.rollout`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.features import NO_TOKEN
from seqmoe_jax.forecast.mamba2 import Mamba2, linear_init, rms_norm
from seqmoe_jax.forecast.noise import Noise, drop, drop_layers, drop_rows

# What a stored predictor has beside its weights: the embedding row of every token id, and how often each expert is
# used in prompts [L, E].
BESIDE = ("token_table", "popularity")
ODDS_SCALE = 1.8  # where training begins; the shipped predictors ended between 1.77 and 2.06


class Inputs(NamedTuple):
    """What positions read. `rows` (token rows) and `echo` are None where the predictor does not use them."""

    features: Float[Array, "B T keys"]
    rows: Int[Array, "B T"] | None = None
    echo: Float[Array, "B T keys"] | None = None


class Outputs(NamedTuple):
    """Logits per position: `next` softmax over E, `retention` sigmoid per key.

    `hidden` is what `refine` starts from.
    """

    hidden: Float[Array, "B T D"]
    next: Float[Array, "B T L E"]
    retention: Float[Array, "B T R L E"]


class Predictor(nnx.Module):
    """The trainable form. `weights()` gives the plain pytree that `plain` runs on."""

    def __init__(self, config: PredictorConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, keys = config.width, config.keys
        # A step's features have `layers` groups whose squares sum to one: fan-in is L, not L*E.
        gain = (keys / config.layers) ** 0.5
        self.in_proj = nnx.Param(linear_init(rngs.params(), keys, width, gain))
        self.in_bias = nnx.Param(jnp.zeros(width))
        if config.uses_token:
            self.token_embed = nnx.Param(jax.random.normal(rngs.params(), (config.token_rows, config.token_width)))
            self.token_proj = nnx.Param(linear_init(rngs.params(), config.token_width, width))
        if config.uses_echo:
            self.echo_proj = nnx.Param(linear_init(rngs.params(), keys, width, gain))
            self.echo_bias = nnx.Param(jnp.zeros(width))
        self.blocks = nnx.List([Mamba2(config.block, rngs=rngs) for _ in range(config.blocks)])
        self.norm = nnx.Param(jnp.ones(width))
        self.next_head = nnx.Param(linear_init(rngs.params(), width, keys, 0.1))
        self.next_bias = nnx.Param(jnp.zeros(keys))
        # Odds of being routed as a line in the log of the softmax: row 0 for the coming step, row 1 once refined.
        # It begins where the uniform distribution means K / E for every expert, whatever the model's shape.
        chance = min(config.active / config.experts, 0.9)
        bias = ODDS_SCALE * math.log(config.experts) + math.log(chance / (1 - chance))
        self.odds_scale = nnx.Param(jnp.full((2, config.layers), ODDS_SCALE))
        self.odds_bias = nnx.Param(jnp.full((2, config.layers), bias))
        scores = len(config.retention) * keys
        self.retention_head = nnx.Param(linear_init(rngs.params(), width, scores, 0.1))
        self.retention_bias = nnx.Param(jnp.full(scores, -1.0))
        self.known_proj = nnx.Param(linear_init(rngs.params(), keys, width, gain))
        self.refine_norm = nnx.Param(jnp.ones(width))
        self.refine_up = nnx.Param(linear_init(rngs.params(), width, 2 * config.refine_width))
        self.refine_down = nnx.Param(linear_init(rngs.params(), config.refine_width, width, 0.5))
        self.refine_out_norm = nnx.Param(jnp.ones(width))
        self.refine_head = nnx.Param(linear_init(rngs.params(), width, keys, 0.1))

    def weights(self) -> dict[str, Any]:
        """Every array by name, `blocks` a list: the plain pytree."""
        flat: dict[str, Any] = {
            name: variable[...] for name, variable in vars(self).items() if isinstance(variable, nnx.Param)
        }
        return flat | {"blocks": [block.weights() for block in self.blocks]}

    def load(self, weights: dict[str, Any]) -> None:
        """Sets every array from a plain pytree of the same structure."""
        for name, value in weights.items():
            if name != "blocks":
                getattr(self, name)[...] = jnp.asarray(value, jnp.float32)
        for block, values in zip(self.blocks, weights["blocks"], strict=True):
            for name, value in values.items():
                getattr(block, name)[...] = jnp.asarray(value, jnp.float32)

    def __call__(
        self,
        inputs: Inputs,
        *,
        valid: Bool[Array, "B T"] | None = None,
        noise: Noise | None = None,
        dtype: Any = jnp.float32,
    ) -> tuple[Outputs, list[dict[str, Array]]]:
        """Forecasts of all positions and every block's state after the last valid one (for prefill)."""
        config, w = self.config, self.weights()
        if noise is not None:
            inputs = _regularise(config, inputs, noise)
        x = embed(config, w, inputs, dtype)
        states = []
        for index, block in enumerate(self.blocks):
            out, state = block.chunked(x, valid)
            x = out if noise is None else x + drop(out - x, noise.rate.dropout, noise.fold(index))
            states.append(state)
        hidden = x if noise is None else drop(x, noise.rate.dropout, noise.fold(100))
        following, retention = heads(config, w, hidden)
        return Outputs(hidden, following, retention), states

    def refine(
        self, hidden: Float[Array, "B T D"], following: Float[Array, "B T L E"], known: Float[Array, "B T keys"]
    ) -> Float[Array, "B T L E"]:
        """Logits of the layers not yet run, given `known`: the running step's routing, zero in layers to come."""
        return refine(self.config, self.weights(), hidden, following, known)


def embed(config: PredictorConfig, w: dict[str, Any], inputs: Inputs, dtype: Any) -> Float[Array, "*B D"]:
    """The residual stream that the first block reads."""
    x = _routing(config, inputs.features, dtype) @ w["in_proj"].astype(dtype) + w["in_bias"].astype(dtype)
    if config.uses_token:
        assert inputs.rows is not None
        x = x + _token_rows(w["token_embed"].astype(dtype), inputs.rows) @ w["token_proj"].astype(dtype)
    if config.uses_echo and inputs.echo is not None:
        found = (inputs.echo.max(-1, keepdims=True) > 0).astype(dtype)
        x = (
            x
            + _routing(config, inputs.echo, dtype) @ w["echo_proj"].astype(dtype)
            + found * w["echo_bias"].astype(dtype)
        )
    return x


def heads(
    config: PredictorConfig, w: dict[str, Any], hidden: Float[Array, "*B D"]
) -> tuple[Float[Array, "*B L E"], Float[Array, "*B R L E"]]:
    """Float32 logits of the coming step and of retention."""
    h = rms_norm(hidden, w["norm"])
    shape = (config.layers, config.experts)
    following = (h @ w["next_head"].astype(h.dtype)).astype(jnp.float32) + w["next_bias"].astype(jnp.float32)
    retention = (h @ w["retention_head"].astype(h.dtype)).astype(jnp.float32) + w["retention_bias"].astype(jnp.float32)
    batch = hidden.shape[:-1]
    return following.reshape(*batch, *shape), retention.reshape(*batch, len(config.retention), *shape)


def refine(
    config: PredictorConfig,
    w: dict[str, Any],
    hidden: Float[Array, "*B D"],
    following: Float[Array, "*B L E"],
    known: Float[Array, "*B keys"],
) -> Float[Array, "*B L E"]:
    """A correction of the logits `following` from the routing of the layers that have run."""
    dtype = hidden.dtype
    z = hidden + _routing(config, known, dtype) @ w["known_proj"].astype(dtype)
    gate, value = jnp.split(rms_norm(z, w["refine_norm"]) @ w["refine_up"].astype(dtype), 2, axis=-1)
    z = z + (jax.nn.silu(gate) * value) @ w["refine_down"].astype(dtype)
    change = rms_norm(z, w["refine_out_norm"]) @ w["refine_head"].astype(dtype)
    return following + change.astype(jnp.float32).reshape(following.shape)


def membership(w: dict[str, Any], logits: Float[Array, "*B L E"], *, refined: bool = False) -> Float[Array, "*B L E"]:
    """Log-odds that an expert is among the K routed ones, from logits of the activation distribution.

    The distribution (summing to 1, as the features do) is what recursion feeds back; the probability of being routed
    (summing to about K) is what prefetch and eviction weigh. Within a layer both order experts alike.
    """
    row = int(refined)
    scale, bias = w["odds_scale"][row].astype(jnp.float32), w["odds_bias"][row].astype(jnp.float32)
    return scale[:, None] * jax.nn.log_softmax(logits, axis=-1) + bias[:, None]


def _token_rows(table: Float[Array, "rows width"], rows: Int[Array, "*B"]) -> Float[Array, "*B width"]:
    """`table[rows]`. Steps without a token share one row: gathered, its gradient would be a sum of thousands of
    colliding atomic additions on a GPU (measured: ten times the time of the whole update)."""
    unknown = (rows == NO_TOKEN)[..., None]
    known = table.at[jnp.where(rows == NO_TOKEN, table.shape[0], rows)].get(mode="fill", fill_value=0)
    return known + unknown.astype(table.dtype) * table[NO_TOKEN]


def _routing(config: PredictorConfig, features: Array, dtype: Any) -> Array:
    return (features.astype(jnp.float32) ** config.power).astype(dtype)


def _regularise(config: PredictorConfig, inputs: Inputs, noise: Noise) -> Inputs:
    """Hides single experts and whole layers of the features, tokens and echoes."""
    rate = noise.rate
    features = drop_layers(inputs.features, config.layers, rate.layer, noise.fold(101))
    features = drop(features, rate.feature, noise.fold(102), rescale=False)
    rows, echo = inputs.rows, inputs.echo
    if rows is not None:
        rows = drop_rows(rows, rate.token, rate.unseen, noise.fold(103))
    if echo is not None:
        echo = echo * jax.random.bernoulli(noise.fold(104), 1 - rate.echo, (*echo.shape[:-1], 1)).astype(echo.dtype)
        echo = drop_layers(echo, config.layers, rate.layer, noise.fold(105))
    return Inputs(features, rows, echo)
