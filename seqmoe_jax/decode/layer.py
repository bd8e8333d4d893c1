"""One layer of a decode step, traced once for all layers of its kind.

What differs between layers of a kind is an operand: the layer's number, its weights, its pool, its mixer's state. So a
model of 48 equal layers is traced and lowered as one layer that is called 48 times; XLA then inlines the calls, and the
step stays one program.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Shaped

from pallas_kernels.router_choice.config import Recorded
from seqmoe_jax.experts.cache import CacheConfig, Landings, SlotCache, moe_decode
from seqmoe_jax.models import block, fused
from seqmoe_jax.models.mixers import State
from seqmoe_jax.models.spec import LayerSpec
from seqmoe_jax.models.weights import LayerWeights
from seqmoe_jax.programs import owned

Hidden = Float[Array, "B 1 *S H"] | fused.Pending


class StepTokens(NamedTuple):
    """What is processed: one token of every sequence."""

    ids: Int32[Array, " B"]
    positions: Int32[Array, "B 1"]
    active: Bool[Array, " B"]  # its sequence goes on


class Routed(NamedTuple):
    """Where a MoE layer sent the tokens, and what it found in the cache."""

    ids: Int[Array, "B K"]
    weights: Float32[Array, "B K"]
    counts: Int32[Array, " 3"]  # experts routed, hits, misses


@owned
@partial(jax.jit, static_argnames=("layer", "kernels"))
def dense_layer(
    x: Hidden,
    state: State,
    tokens: StepTokens,
    weights: LayerWeights,
    *,
    layer: LayerSpec,
    kernels: fused.DecodeKernels,
) -> tuple[Hidden, State]:
    """A layer without experts."""
    with jax.named_scope("mixer"):
        x, state = fused.mix(x, state, tokens.positions, tokens.active, weights, layer, kernels)
    with jax.named_scope("mlp"):
        return _barrier(block.dense(fused.settled(x), weights, layer)), state


@owned
@partial(jax.jit, static_argnames=("layer", "kernels", "config"))
def moe_layer(
    x: Hidden,
    state: State,
    cache: SlotCache,
    tokens: StepTokens,
    index: Int32[Array, ""],
    weights: LayerWeights,
    pool: Shaped[Array, "E n"],
    transfers: Landings | None,
    recorded: Recorded | None,
    *,
    layer: LayerSpec,
    kernels: fused.DecodeKernels,
    config: CacheConfig,
) -> tuple[Hidden, State, SlotCache, Routed]:
    """A layer with experts, the `index`-th of them."""
    with jax.named_scope("mixer"):
        x, state = fused.mix(x, state, tokens.positions, tokens.active, weights, layer, kernels)
    with jax.named_scope("moe"):
        normed, mixing, ids, shares = fused.route(x, tokens.ids, tokens.active, weights, layer, kernels, recorded)
        y, cache, counts = moe_decode(normed, ids, shares, cache, pool, index, config, transfers)
        x = fused.moe_output(x, normed, mixing, y, weights, layer, kernels)
    return _barrier(x), state, cache, Routed(ids, shares, counts)


def _barrier(x: Hidden) -> Hidden:
    # Without this XLA recomputes sums of earlier layers inside later fusions, and compiling takes time that is
    # exponential in the number of layers (ten layers at batch 4 for a GPU: over 280 s, against 18 s).
    return jax.lax.optimization_barrier(x)
