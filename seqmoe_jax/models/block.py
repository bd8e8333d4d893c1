"""The decoder around its parts: embedding, the two halves of a layer, output head. Decoding and prefill both use it.

How the routed experts are applied is the caller's: it stands between `moe_input` and `moe_output`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from pallas_kernels.arithmetic import einsum
from pallas_kernels.backend import Implementation
from seqmoe_jax.models.mixers import State
from seqmoe_jax.models.mlp import DenseSpec, DenseWeights
from seqmoe_jax.models.residual import Mixing
from seqmoe_jax.models.spec import LayerSpec, ModelSpec
from seqmoe_jax.models.weights import LayerWeights, ModelWeights, MoEWeights


def embed(tokens: Int[Array, "B T"], table: Float[Array, "V H"], spec: ModelSpec) -> Float[Array, "B T *S H"]:
    """Embeddings of tokens, scaled; where the model has streams, each begins as a copy."""
    x = table[tokens] if spec.embedding_scale == 1 else table[tokens] * jnp.asarray(spec.embedding_scale, table.dtype)
    return x if spec.head is None else jnp.repeat(x[:, :, None], spec.head.streams, axis=2)


def mix(
    x: Float[Array, "B T *S H"],
    state: State,
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    weights: LayerWeights,
    layer: LayerSpec,
    implementation: Implementation = "xla",
) -> tuple[Float[Array, "B T *S H"], State]:
    """The first half of a layer: every position takes in what its sequence's past holds for it."""
    entered, mixing = layer.residual.enter(x, weights.mixer_residual)
    normed = layer.norm(entered, weights.input_norm)
    mixed, state = layer.mixer.apply(normed, state, positions, valid, weights.mixer, implementation)
    return layer.residual.leave(x, mixed, mixing), state


def dense(x: Float[Array, "B T *S H"], weights: LayerWeights, layer: LayerSpec) -> Float[Array, "B T *S H"]:
    """The second half of a layer without experts."""
    assert isinstance(layer.mlp, DenseSpec)
    assert isinstance(weights.mlp, DenseWeights)
    entered, mixing = layer.residual.enter(x, weights.mlp_residual)
    return layer.residual.leave(x, layer.mlp(layer.norm(entered, weights.post_norm), weights.mlp), mixing)


def moe_input(
    x: Float[Array, "B T *S H"], weights: LayerWeights, layer: LayerSpec
) -> tuple[Float[Array, "BT H"], Mixing | None]:
    """What router and experts of a MoE layer see, one row per token, and what `moe_output` needs."""
    entered, mixing = layer.residual.enter(x, weights.mlp_residual)
    return layer.norm(entered, weights.post_norm).reshape(-1, x.shape[-1]), mixing


def moe_output(
    x: Float[Array, "B T *S H"],
    normed: Float[Array, "BT H"],
    mixing: Mixing | None,
    routed: Float32[Array, "BT H"],
    weights: LayerWeights,
    layer: LayerSpec,
) -> Float[Array, "B T *S H"]:
    """`x` with the routed experts' sum and the shared expert; `normed` and `mixing` are what `moe_input` gave."""
    assert not isinstance(layer.mlp, DenseSpec)
    assert isinstance(weights.mlp, MoEWeights)
    y = routed.astype(x.dtype)
    if layer.mlp.shared is not None and weights.mlp.shared is not None:
        y = y + layer.mlp.shared(normed, weights.mlp.shared)
    return layer.residual.leave(x, y.reshape(*x.shape[:2], -1), mixing)


def logits_of(x: Float[Array, "B *S H"], weights: ModelWeights, spec: ModelSpec) -> Float32[Array, "B V"]:
    """Streams into one, final norm and output head."""
    if spec.head is not None and weights.streams is not None:
        x = spec.head(x[:, None], weights.streams)[:, 0]
    logits = einsum("bh,vh->bv", spec.norm(x, weights.norm), weights.head)
    return logits if spec.logits_scale == 1 else logits / spec.logits_scale
