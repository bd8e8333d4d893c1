"""The decoder around its parts: embedding, the two halves of a layer, output head. Decoding and prefill both use it.

How the routed experts are applied is the caller's: it stands between `moe_input` and `moe_output`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from seqmoe_jax.models.layers import einsum
from seqmoe_jax.models.mixers import State
from seqmoe_jax.models.mlp import DenseSpec, DenseWeights
from seqmoe_jax.models.spec import LayerSpec, ModelSpec
from seqmoe_jax.models.weights import LayerWeights, ModelWeights, MoEWeights


def embed(tokens: Int[Array, "B T"], table: Float[Array, "V H"], scale: float) -> Float[Array, "B T H"]:
    """Embeddings of tokens, times the model's `embedding_scale`."""
    return table[tokens] if scale == 1 else table[tokens] * jnp.asarray(scale, table.dtype)


def mix(
    x: Float[Array, "B T H"],
    state: State,
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    weights: LayerWeights,
    layer: LayerSpec,
) -> tuple[Float[Array, "B T H"], State]:
    """The first half of a layer: every position takes in what its sequence's past holds for it."""
    normed = layer.norm(x, weights.input_norm)
    mixed, state = layer.mixer.apply(normed, state, positions, valid, weights.mixer)
    return _add(x, mixed, layer), state


def dense(x: Float[Array, "B T H"], weights: LayerWeights, layer: LayerSpec) -> Float[Array, "B T H"]:
    """The second half of a layer without experts."""
    assert isinstance(layer.mlp, DenseSpec)
    assert isinstance(weights.mlp, DenseWeights)
    return _add(x, layer.mlp(layer.norm(x, weights.post_norm), weights.mlp), layer)


def moe_input(x: Float[Array, "B T H"], weights: LayerWeights, layer: LayerSpec) -> Float[Array, "BT H"]:
    """What router and experts of a MoE layer see, one row per token."""
    return layer.norm(x, weights.post_norm).reshape(-1, x.shape[-1])


def moe_output(
    x: Float[Array, "B T H"],
    normed: Float[Array, "BT H"],
    routed: Float32[Array, "BT H"],
    weights: LayerWeights,
    layer: LayerSpec,
) -> Float[Array, "B T H"]:
    """`x` with the routed experts' sum and the shared expert; `normed` is what `moe_input` gave."""
    assert not isinstance(layer.mlp, DenseSpec)
    assert isinstance(weights.mlp, MoEWeights)
    y = routed.astype(x.dtype)
    if layer.mlp.shared is not None and weights.mlp.shared is not None:
        y = y + layer.mlp.shared(normed, weights.mlp.shared)
    return _add(x, y.reshape(x.shape), layer)


def _add(x: Float[Array, "B T H"], y: Float[Array, "B T H"], layer: LayerSpec) -> Float[Array, "B T H"]:
    return x + y if layer.residual == 1 else x + y * jnp.asarray(layer.residual, x.dtype)


def logits_of(x: Float[Array, "B H"], weights: ModelWeights, spec: ModelSpec) -> Float32[Array, "B V"]:
    """Final norm and output head."""
    logits = einsum("bh,vh->bv", spec.norm(x, weights.norm), weights.head)
    return logits if spec.logits_scale == 1 else logits / spec.logits_scale
