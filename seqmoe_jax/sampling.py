"""Choosing the next token, inside the decode step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, UInt32

from seqmoe_jax.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are drawn. `temperature=0` is greedy and ignores the rest.

    Filters apply in the order temperature, top-k (0 = off), top-p (1 = off), min-p (0 = off). The draw of a sequence
    depends on its `seed` and position alone, so it is the same at every residency, policy and place in a batch.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            "temperature": (self.temperature, self.temperature >= 0, "0 (greedy) or positive"),
            "top_k": (self.top_k, self.top_k >= 0, "0 (off) or positive"),
            "top_p": (self.top_p, 0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (self.min_p, 0 <= self.min_p < 1, "in [0, 1)"),
            "seed": (self.seed, 0 <= self.seed < 2**32, "in [0, 2^32)"),
        }
        for name, (value, valid, expected) in checks.items():
            if not valid:
                raise ConfigError(f"{name} must be {expected}, got {value}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def override(self, **given: float | int | None) -> SamplingConfig:
        """The same with the options that are given, those that are not None. Raises `ConfigError`."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]

    def spread(self, count: int) -> list[SamplingConfig]:
        """For `count` sequences of one batch, which are to differ: sequence b draws with seed + b."""
        return [replace(self, seed=(self.seed + b) % 2**32) for b in range(count)]


class SamplingParams(NamedTuple):
    """`SamplingConfig` of every sequence as device arrays."""

    temperature: Float32[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float32[Array, " B"]
    min_p: Float32[Array, " B"]
    seed: UInt32[Array, " B"]

    @classmethod
    def of(cls, configs: Sequence[SamplingConfig], batch: int) -> SamplingParams:
        """One configuration per sequence; the rest of `batch` is padding. Raises `ConfigError` for a mixture.

        Greedy and drawn sequences are different programs.
        """
        if len({config.greedy for config in configs}) != 1:
            raise ConfigError("the sequences of one batch must be either all greedy or all drawn")
        configs = [*configs, *[configs[-1]] * (batch - len(configs))]
        params = dict(
            temperature=np.array([config.temperature or 1.0 for config in configs], np.float32),
            top_k=np.array([config.top_k for config in configs], np.int32),
            top_p=np.array([config.top_p for config in configs], np.float32),
            min_p=np.array([config.min_p for config in configs], np.float32),
            seed=np.array([config.seed for config in configs], np.uint32),
        )
        # `jnp.asarray` would compile a program for each dtype.
        return cls(**jax.device_put(params))


def mask_padding(logits: Float[Array, "B V"], vocab: int) -> Float[Array, "B V"]:
    """Logits of ids from `vocab` on at -inf: rows of the output head that stand for no token."""
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab, logits, -jnp.inf)


def greedy(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """The most likely token, lowest id on a tie."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def filter_logits(logits: Float32[Array, "B V"], params: SamplingParams) -> Float32[Array, "B V"]:
    """Tempered logits with everything outside top-k, top-p and min-p at -inf. The best token always stays."""
    logits = logits / params.temperature[:, None]
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
    """One draw per sequence; `positions` are those of the tokens drawn."""
    keys = jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(params.seed), positions)
    return jax.vmap(jax.random.categorical)(keys, filter_logits(logits.astype(jnp.float32), params)).astype(jnp.int32)
