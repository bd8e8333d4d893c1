"""Choosing the next token, inside the decode step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, UInt32

from seqmoe_jax.options import SamplingConfig


class SamplingParams(NamedTuple):
    """`SamplingConfig` of every sequence as device arrays."""

    temperature: Float32[Array, " B"]  # 0: greedy
    top_k: Int[Array, " B"]
    top_p: Float32[Array, " B"]
    min_p: Float32[Array, " B"]
    seed: UInt32[Array, " B"]

    @classmethod
    def of(cls, configs: Sequence[SamplingConfig], batch: int) -> SamplingParams:
        """One configuration per sequence; the rest of `batch` is padding."""
        configs = [*configs, *[configs[-1]] * (batch - len(configs))]
        params = dict(
            temperature=np.array([_float32(config.temperature) for config in configs], np.float32),
            top_k=np.array([config.top_k for config in configs], np.int32),
            top_p=np.array([config.top_p for config in configs], np.float32),
            min_p=np.array([config.min_p for config in configs], np.float32),
            seed=np.array([config.seed for config in configs], np.uint32),
        )
        # `jnp.asarray` would compile a program for each dtype.
        return cls(**jax.device_put(params))


def _float32(temperature: float | int) -> float:
    """Within what a division by it can take: smaller ones are no numbers on devices, larger ones make all equal too."""
    limits = np.finfo(np.float32)
    if temperature == 0:
        return 0.0
    return float(min(max(temperature, float(limits.tiny)), float(limits.max)))


def mask_padding(logits: Float[Array, "B V"], vocab: int) -> Float[Array, "B V"]:
    """Logits of ids from `vocab` on at -inf: rows of the output head that stand for no token."""
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab, logits, -jnp.inf)


def greedy(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """The most likely token, lowest id on a tie."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def filter_logits(logits: Float32[Array, "B V"], params: SamplingParams) -> Float32[Array, "B V"]:
    """Tempered logits with everything outside top-k, top-p and min-p at -inf. The best token always stays."""
    # Less the best one, which stays 0 at any temperature: near 0 the others are at -inf, and nothing overflows.
    temperature = jnp.where(params.temperature > 0, params.temperature, 1.0)
    logits = (logits - logits.max(axis=-1, keepdims=True)) / temperature[:, None]
    ranked = -jnp.sort(-logits, axis=-1)
    vocab = logits.shape[-1]
    last = jnp.clip(jnp.where(params.top_k > 0, params.top_k, vocab), 1, vocab) - 1
    floor = jnp.take_along_axis(ranked, last[:, None], axis=-1)  # the k-th best logit
    # Top-p is taken over what top-k left: the smallest set of best tokens whose mass reaches p.
    kept = jnp.where(ranked >= floor, ranked, -jnp.inf)
    probability = jax.nn.softmax(kept, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    inside = (before < params.top_p[:, None]) & (ranked >= floor)
    inside &= probability >= params.min_p[:, None] * probability[:, :1]
    count = jnp.maximum(inside.sum(axis=-1, keepdims=True), 1)
    floor = jnp.take_along_axis(ranked, count - 1, axis=-1)
    return jnp.where(logits >= floor, logits, -jnp.inf)


def sample(logits: Float[Array, "B V"], params: SamplingParams, positions: Int[Array, " B"]) -> Int[Array, " B"]:
    """One draw per sequence, or its most likely token at temperature 0; `positions` are those of the tokens drawn."""
    keys = jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(params.seed), positions)
    drawn = jax.vmap(jax.random.categorical)(keys, filter_logits(logits.astype(jnp.float32), params))
    return jnp.where(params.temperature > 0, drawn.astype(jnp.int32), greedy(logits))
