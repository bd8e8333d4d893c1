"""A MoE block whose experts lie in host memory, in place of a zoo's own."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import errors, nnx
from jaxtyping import Array, Float, Float32, Int, Shaped

from pallas_kernels.arithmetic import einsum
from pallas_kernels.grouped_moe import combine
from seqmoe_jax.errors import EngineError
from seqmoe_jax.experts.cache import CacheConfig, SlotCache, moe_decode
from seqmoe_jax.models.spec import MoESpec
from seqmoe_jax.models.weights import MoEWeights
from seqmoe_jax.nnx.slots import ExpertSlots, HostExperts, Slots
from seqmoe_jax.options import MAX_BATCH
from seqmoe_jax.prefill.experts import moe_prefill

Beside = Literal["nothing", "logits", "weights"]


class OffloadedMoE(nnx.Module):
    """A drop-in for the MoE block of a language model: `x [B, T, D] -> [B, T, D]`.

    Router and shared expert are on the device, the experts in `pinned_host` memory; those that a call needs are looked
    up in the slots that all blocks share, and loaded where they are not there. The result is that of the block with all
    experts on the device, whatever has a slot.

    It belongs into a program that donates the model: `nnx.jit(step, donate_argnums=0)`. Called outside of any, it is a
    program of its own. Calls of up to 8 tokens (B * T) are decoded, experts loaded on demand; longer ones are read as a
    prompt, every expert loaded once. `offload` makes these blocks.
    """

    def __init__(
        self,
        spec: MoESpec,
        weights: MoEWeights,
        experts: Shaped[Array, "E n"],
        slots: ExpertSlots,
        *,
        index: int,
        beside: Beside = "nothing",
    ):
        """
        Args:
          weights: of router and shared expert, in the dtype of the activations.
          experts: blocks of `slots.config.layout`, in pinned host memory.
          index: which of the blocks that share the slots this is.
          beside: what it returns beside its output, `(y, ...)`: the router's "logits" or the "weights" of all experts,
            both `[B * T, E]` in float32, as some zoos have it.
        """
        self.spec, self.index, self.beside = spec, index, beside
        self.weights = nnx.Variable(weights)
        self.experts = HostExperts(experts)
        self.slots = slots

    def __call__(self, x: Float[Array, "B T D"]) -> Any:
        hidden = x.reshape(-1, x.shape[-1])
        weights, state = self.weights.get_value(), self.slots.state
        ids, shares = self.spec.router(hidden, jnp.zeros(hidden.shape[0], jnp.int32), weights.router)
        inside = isinstance(x, jax.core.Tracer) or isinstance(state.get_value().counts, jax.core.Tracer)
        y, new = (apply_experts if inside else _apply_alone)(
            hidden, ids, shares, state.get_value(), self.experts.get_value(), jnp.int32(self.index),
            config=self.slots.config,
        )  # fmt: skip
        try:
            state.set_value(new)
        except errors.TraceContextError:
            raise EngineError(
                "expected a program in which the model is an argument or the carry of its loop, got a loop or a "
                "transformation of JAX around a model from outside of it; use nnx.jit, nnx.scan or nnx.fori_loop with "
                "the model among what they are given"
            ) from None
        y = y.astype(x.dtype)
        if self.spec.shared is not None and weights.shared is not None:
            y = y + self.spec.shared(hidden, weights.shared)
        y = y.reshape(x.shape)
        return y if self.beside == "nothing" else (y, self._beside(hidden, ids, shares, weights.router))

    def _beside(
        self, hidden: Float[Array, "N D"], ids: Int[Array, "N K"], shares: Float32[Array, "N K"], router: Any
    ) -> Float32[Array, "N E"]:
        if self.beside == "weights":
            rows = jnp.arange(ids.shape[0])[:, None]
            return jnp.zeros((ids.shape[0], self.spec.num_experts), jnp.float32).at[rows, ids].set(shares)
        logits = einsum("th,eh->te", hidden, router.weight)
        return logits if router.bias is None else logits + router.bias.astype(jnp.float32)


def routed_experts(
    x: Float[Array, "N D"],
    ids: Int[Array, "N K"],
    shares: Float32[Array, "N K"],
    slots: Slots,
    experts: Shaped[Array, "E n"],
    index: Int[Array, ""],
    *,
    config: CacheConfig,
) -> tuple[Float32[Array, "N D"], Slots]:
    """The weighted sum of what the experts of a block say of each token, and the slots after that."""
    cache, counts, top_k = slots.cache, slots.counts, ids.shape[1]
    if x.shape[0] > MAX_BATCH:
        out, place, cache, new = moe_prefill(x, ids, cache, experts, index, config)
        y = combine(out, place, shares)
        counts = counts + new
    else:
        # As many tokens at a time as the slots are sure to hold the experts of; all of them, as a rule.
        step = len(x) if not config.managed else max(1, min(len(x), config.slots // top_k))
        parts = []
        for start in range(0, len(x), step):
            rows = slice(start, start + step)
            part, cache, new = moe_decode(x[rows], ids[rows], shares[rows], cache, experts, index, config)
            parts.append(part)
            counts = counts + new
        y = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return y, Slots(cache=_after(cache, index, config), counts=counts)


def _after(cache: SlotCache, index: Int[Array, ""], config: CacheConfig) -> SlotCache:
    """The clock goes on behind the last block, as at the end of a step."""
    return cache._replace(clock=cache.clock + jnp.where(index == config.layers - 1, config.layers, 0).astype(jnp.int32))


apply_experts = jax.jit(routed_experts, static_argnames="config")  # traced once for all blocks
_apply_alone = partial(jax.jit, static_argnames="config", donate_argnames="slots")(routed_experts)
