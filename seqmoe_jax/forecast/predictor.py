"""The predictor as a Flax NNX module: it reads routing and the coming token and forecasts routing (paper 5.2, 5.3).

Input projections and Mamba2 blocks come before three heads. They say which experts the coming step uses, how soon each
is used after it (retention), and, once that step has run its first layers, a refined forecast of the other layers.

Position t of a sequence reads the routing of step t - 1 (zeros at the start) and the token that step t will process,
and forecasts step t. The module runs whole sequences, in training and evaluation; `inference` runs one step at a time.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.heads import Inputs, embed, heads, refine
from seqmoe_jax.forecast.mamba2 import Mamba2, linear_init
from seqmoe_jax.forecast.noise import Noise, drop, regularise
from seqmoe_jax.forecast.tensors import BESIDE

ODDS_SCALE = 1.8  # Training begins here; the shipped predictors ended between 1.77 and 2.06.


class Outputs(NamedTuple):
    """Logits of every position, as `heads` makes them, and the `hidden` state that `Predictor.refine` starts from."""

    hidden: Float[Array, "B T D"]
    next: Float[Array, "B T L E"]
    retention: Float[Array, "B T L E"]


class Predictor(nnx.Module):
    """The trainable form. `weights()` gives the plain pytree that `inference` runs on."""

    def __init__(self, config: PredictorConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, keys = config.d_model, config.keys
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
        # The line of `membership`: row 0 is for the coming step, row 1 for refined logits. It begins where the uniform
        # distribution means a probability of K / E for every expert.
        chance = min(config.active / config.experts, 0.9)
        bias = ODDS_SCALE * math.log(config.experts) + math.log(chance / (1 - chance))
        self.odds_scale = nnx.Param(jnp.full((2, config.layers), ODDS_SCALE))
        self.odds_bias = nnx.Param(jnp.full((2, config.layers), bias))
        self.retention_head = nnx.Param(linear_init(rngs.params(), width, keys, 0.1))
        self.retention_bias = nnx.Param(jnp.full(keys, -1.0))
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
        """Sets every parameter from a plain pytree of the same structure, such as `store.load` reads.

        What stands beside the weights there is no parameter and is left out: the row of each token id (`token_table`,
        which `inference.token_rows` reads) and how often prompts use each expert (`popularity`).
        """
        for name, value in weights.items():
            if name != "blocks" and name not in BESIDE:
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
    ) -> Outputs:
        """Forecasts of all positions. Valid positions come first; `noise` regularises training."""
        config, w = self.config, self.weights()
        if noise is not None:
            inputs = regularise(config, inputs, noise)
        x = embed(config, w, inputs, dtype)
        for index, block in enumerate(self.blocks):
            out, _ = block.chunked(x, valid)
            x = out if noise is None else x + drop(out - x, noise.rate.dropout, noise.fold(index))
        hidden = x if noise is None else drop(x, noise.rate.dropout, noise.fold(100))
        following, retention = heads(config, w, hidden)
        return Outputs(hidden, following, retention)

    def refine(
        self, hidden: Float[Array, "B T D"], following: Float[Array, "B T L E"], known: Float[Array, "B T keys"]
    ) -> Float[Array, "B T L E"]:
        """Logits of the layers not yet run, given `known`: the running step's routing, zero in layers to come."""
        return refine(self.config, self.weights(), hidden, following, known)


@functools.lru_cache
def graph_of(config: PredictorConfig) -> Any:
    """The static part of a `Predictor`, made without its weights."""
    return nnx.split(nnx.eval_shape(lambda: Predictor(config, rngs=nnx.Rngs(0))), nnx.Param)[0]


def params_of(config: PredictorConfig, weights: dict[str, Any]) -> Any:
    """The trainable NNX state that holds the weights of a plain pytree."""
    model = Predictor(config, rngs=nnx.Rngs(0))
    model.load(weights)
    return nnx.state(model, nnx.Param)


def weights_of(config: PredictorConfig, params: Any) -> dict[str, Any]:
    """The plain pytree of a trainable NNX state."""
    weights: dict[str, Any] = nnx.merge(graph_of(config), params).weights()
    return weights
