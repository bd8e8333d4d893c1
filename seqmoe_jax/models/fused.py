"""The parts of a layer around its experts for one new position per sequence, in as few launches as can be.

What the kernels do not cover (`unfit` says what) is computed by `block`, in plain XLA; the results are the same up to
the order of sums. Shapes as in `block`, with T = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from pallas_kernels.backend import Implementation
from pallas_kernels.decode_attention import Heads, decode_attention, unfit_heads
from pallas_kernels.matvec import matvec, unfit_batch
from pallas_kernels.router_choice import Recorded, router_choice, unfit_choice
from seqmoe_jax.models import block
from seqmoe_jax.models.layers import mask_inactive
from seqmoe_jax.models.mixers import State
from seqmoe_jax.models.mixers.gqa import GQA, KV
from seqmoe_jax.models.residual import Add, Mixing
from seqmoe_jax.models.routers import RouterSpec
from seqmoe_jax.models.spec import LayerSpec, ModelSpec, MoESpec
from seqmoe_jax.models.weights import LayerWeights, ModelWeights, MoEWeights


@dataclass(frozen=True, kw_only=True)
class DecodeKernels:
    """What computes each part of a decode step beside the experts: the kernels ("gpu") or plain XLA.

    projection: the matrices before and after attention, and the output head.
    interpret: run the kernels in Pallas's interpreter; for tests.
    """

    attention: Implementation = "xla"
    router: Implementation = "xla"
    projection: Implementation = "xla"
    interpret: bool = False

    @classmethod
    def of(cls, implementation: Implementation) -> DecodeKernels:
        """All of them where the experts' kernels are those for GPUs."""
        one: Implementation = "gpu" if implementation == "gpu" else "xla"
        return cls(attention=one, router=one, projection=one)


PLAIN = DecodeKernels()


class Pending(NamedTuple):
    """Hidden states `x` to which the routed experts' sum is still to be added: by the kernel that reads them next."""

    x: Float[Array, "B 1 H"]
    routed: Float32[Array, "B H"]

    @property
    def sum(self) -> Float[Array, "B 1 H"]:
        return self.x + self.routed.astype(self.x.dtype)[:, None]


def unfit(spec: ModelSpec, kernels: DecodeKernels) -> list[str]:
    """Which parts of the model stay with XLA though kernels are asked for, and why."""
    reasons = []
    for layer in spec.layers:
        if kernels != PLAIN and not isinstance(layer.residual, Add):
            reasons.append(f"all beside the experts, for {type(layer.residual).__name__}: no kernel")
        if kernels.attention == "gpu":
            if not isinstance(layer.mixer, GQA):
                reasons.append(f"{type(layer.mixer).__name__} mixers: no kernel")
            elif reason := unfit_heads(heads_of(layer.mixer)):
                reasons.append(f"attention: {reason}")
            if reason := layer.mixer.unfit_chunks():
                reasons.append(f"attention of prompts: {reason}")
        if kernels.router == "gpu" and isinstance(layer.mlp, MoESpec) and not _routable(layer.mlp.router):
            reasons.append("the router: no kernel for this kind")
    return list(dict.fromkeys(reasons))


def heads_of(mixer: GQA) -> Heads:
    """The mixer in the kernel's terms."""
    rope = mixer.rope
    return Heads(
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        scale=mixer.scale,
        norm=mixer.norm if mixer.qk_norm else None,
        norm_over=mixer.qk_norm or "head",
        clip=mixer.clip_qkv,
        rotary_dim=rope.rotary_dim,
        rotary_offset=0 if rope.rotated == "first" else mixer.head_dim - rope.rotary_dim,
        rotary_layout=rope.layout,
    )


def mix(
    x: Float[Array, "B 1 *S H"] | Pending,
    state: State,
    positions: Int[Array, "B 1"],
    active: Bool[Array, " B"],
    weights: LayerWeights,
    layer: LayerSpec,
    kernels: DecodeKernels,
) -> tuple[Float[Array, "B 1 *S H"], State]:
    """`block.mix` of one position per sequence."""
    mixer, residual = layer.mixer, layer.residual
    wanted = kernels.attention == "gpu"
    if not wanted or not isinstance(mixer, GQA) or not isinstance(residual, Add) or unfit_heads(heads_of(mixer)):
        return block.mix(settled(x), state, positions, active[:, None], weights, layer)
    w, at = weights.mixer, positions[:, 0]
    flat, addend = (x.x[:, 0], x.routed) if isinstance(x, Pending) else (x[:, 0], None)
    projection: Implementation = "gpu" if _projecting(flat.shape[0], kernels) else "xla"
    qkv, _, flat = matvec(
        flat, w.qkv, bias=w.qkv_bias, norm=layer.norm, norm_weight=weights.input_norm, addend=addend,
        name="matvec_qkv", implementation=projection, interpret=kernels.interpret,
    )  # fmt: skip
    cos, sin = mixer.rope.factors(at, mixer.head_dim, flat.dtype)
    out, *kv = decode_attention(
        qkv, state.k, state.v, at, cos, sin, heads=heads_of(mixer), q_norm=w.q_norm, k_norm=w.k_norm, sinks=w.sinks,
        implementation=kernels.attention, interpret=kernels.interpret,
    )  # fmt: skip
    if mixer.output_gate:
        out = out * jax.nn.sigmoid(qkv[:, (mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim :])
    flat, *_ = matvec(
        out, w.o, bias=w.o_bias, residual=flat, residual_scale=residual.scale, name="matvec_out",
        implementation=projection, interpret=kernels.interpret,
    )  # fmt: skip
    return flat[:, None], KV(*kv)


def route(
    x: Float[Array, "B 1 *S H"],
    tokens: Int[Array, " B"],
    active: Bool[Array, " B"],
    weights: LayerWeights,
    layer: LayerSpec,
    kernels: DecodeKernels,
    recorded: Recorded | None = None,
) -> tuple[Float[Array, "B H"], Mixing | None, Int[Array, "B K"], Float32[Array, "B K"]]:
    """`block.moe_input`, and where each token goes (-1 for ended sequences) with which weights."""
    assert isinstance(layer.mlp, MoESpec)
    assert isinstance(weights.mlp, MoEWeights)
    router, w = layer.mlp.router, weights.mlp.router
    plain = kernels.router != "gpu" or not isinstance(layer.residual, Add) or unfit_batch(x.shape[0])
    if plain or not _routable(router):
        normed, mixing = block.moe_input(x, weights, layer)
        ids, shares = router(normed, tokens, w)
        if recorded is not None:
            # Depends on the model's own routing, so that the work of the router is done and timed.
            ids = jnp.where(ids < router.num_experts, recorded.ids[recorded.row, recorded.layer], ids)
            shares = jnp.broadcast_to(recorded.weights[recorded.row, recorded.layer], ids.shape)
        return normed, mixing, mask_inactive(ids, active), shares
    logits, normed, _ = matvec(
        x[:, 0], w.weight, norm=layer.norm, norm_weight=weights.post_norm, dtype=jnp.dtype(jnp.float32),
        name="matvec_router", implementation=kernels.router, interpret=kernels.interpret,
    )  # fmt: skip
    ids, shares = router_choice(
        logits, active, choice=router.choice(x.dtype), bias=w.bias, correction=w.correction_bias, recorded=recorded,
        implementation=kernels.router, interpret=kernels.interpret,
    )  # fmt: skip
    return normed, None, ids, shares


def moe_output(
    x: Float[Array, "B 1 *S H"],
    normed: Float[Array, "B H"],
    mixing: Mixing | None,
    routed: Float32[Array, "B H"],
    weights: LayerWeights,
    layer: LayerSpec,
    kernels: DecodeKernels,
) -> Float[Array, "B 1 *S H"] | Pending:
    """`block.moe_output`, or what it is made of where the next projection can add that up."""
    assert isinstance(layer.mlp, MoESpec)
    if layer.residual == Add() and layer.mlp.shared is None and _projecting(x.shape[0], kernels):
        return Pending(x, routed)
    return block.moe_output(x, normed, mixing, routed, weights, layer)


def settled(x: Float[Array, "B 1 *S H"] | Pending) -> Float[Array, "B 1 *S H"]:
    """Hidden states to which nothing is to be added."""
    return x.sum if isinstance(x, Pending) else x


def logits_of(
    x: Float[Array, "B *S H"], weights: ModelWeights, spec: ModelSpec, kernels: DecodeKernels
) -> Float32[Array, "B V"]:
    """`block.logits_of`."""
    if not _projecting(x.shape[0], kernels) or spec.head is not None:
        return block.logits_of(x, weights, spec)
    logits, *_ = matvec(
        x, weights.head, norm=spec.norm, norm_weight=weights.norm, dtype=jnp.dtype(jnp.float32), name="matvec_head",
        implementation=kernels.projection, interpret=kernels.interpret,
    )  # fmt: skip
    return logits if spec.logits_scale == 1 else logits / spec.logits_scale


def _projecting(batch: int, kernels: DecodeKernels) -> bool:
    return kernels.projection == "gpu" and not unfit_batch(batch)


def _routable(router: RouterSpec) -> bool:
    by_score = router.hashed is None and router.groups is None
    return by_score and not unfit_choice(router.num_experts, router.top_k)
