"""A model of this package as a Flax NNX module, for loops that zoos and notebooks write themselves."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float32, Int, Int32

from seqmoe_jax.compilation import enable_compilation_cache
from seqmoe_jax.decode.state import empty_sequences
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.loading import load_model
from seqmoe_jax.models import block
from seqmoe_jax.models.model import Model
from seqmoe_jax.models.spec import LayerSpec, MoESpec
from seqmoe_jax.models.weights import LayerWeights, MoEWeights
from seqmoe_jax.nnx.block import apply_experts
from seqmoe_jax.nnx.offload import cache_config, fill, in_jax_memory
from seqmoe_jax.nnx.slots import ExpertSlots, HostExperts
from seqmoe_jax.options import Residency
from seqmoe_jax.progress import ProgressBar, shows_progress

Cache = dict[str, Any]  # "length" [B], and the state of every layer's mixer by "layer_0", "layer_1", ...


class OffloadedLM(nnx.Module):
    """A decoder with its experts in host memory: `logits, cache = model(tokens, positions, cache, mask)`.

    The program that calls it must donate the model, as for `OffloadedMoE`; donate the cache, too. `forward` is such a
    program. `slots.hit_rate` says how often experts were found on the device.
    """

    def __init__(
        self,
        model: Model,
        *,
        residency: Residency = 0.45,
        policy: Literal["lru", "lfu"] | str = "lru",
        kernels: Any = None,
    ):
        """Takes over a model in memory, whose pools must not be in use elsewhere. Raises as `offload` does."""
        spec, device = model.spec, next(iter(model.weights.embed.devices()))
        config = cache_config(spec, len(spec.moe_layers), residency, policy, kernels)
        self.spec, self.name = spec, model.name
        weights: Any = model.weights
        # A tied head is the embedding: an array that is donated may be there once.
        self.weights = nnx.Variable(weights._replace(head=None) if spec.tied else weights)
        self.slots = ExpertSlots(config, device)
        self.experts = nnx.List([HostExperts(in_jax_memory(pool, device)) for pool in model.pools])
        if not config.managed:
            for index, pool in enumerate(self.experts):
                fill(self.slots, pool.get_value(), index)

    @classmethod
    def from_pretrained(
        cls, model: str | Path, *, dtype: str | None = None, progress: bool | None = None, **options: Any
    ) -> OffloadedLM:
        """A checkpoint directory, a Hugging Face id or "demo"; `options` are those of the class.

        Raises `CheckpointError`, `ConfigError` or `ResidencyError`.
        """
        enable_compilation_cache()
        with ProgressBar(shows_progress(progress), f"loading {model}") as bar:
            loaded, _ = load_model(model, dtype=dtype, progress=bar)
        return cls(loaded, **options)

    def init_cache(self, batch_size: int, cache_size: int, dtype: Any = None) -> Cache:
        """Room for `cache_size` positions of each of `batch_size` sequences, with nothing in it."""
        if not 1 <= cache_size <= self.spec.context:
            raise ConfigError(
                f"cache_size must be from 1 to the model's context of {self.spec.context}, got {cache_size}"
            )
        held = np.dtype(dtype or self.weights.get_value().embed.dtype)
        states = _empty(self.spec, batch_size, cache_size, held)
        named: Cache = {f"layer_{index}": state for index, state in enumerate(states)}
        return named | {"length": jnp.zeros(batch_size, jnp.int32)}

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: Cache,
        mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float32[Array, "B T V"], Cache]:
        """Logits after every token, and the cache with the tokens in it.

        Args:
          positions: consecutive in each row. Every token sees itself and all before it: no mask of pairs is needed.
          mask: which tokens are real; those that are not stand at a row's end, and leave no trace. Default: all are.
        """
        weights, new = self.weights.get_value(), dict(cache)
        weights = weights._replace(head=weights.embed) if self.spec.tied else weights
        valid = jnp.ones(tokens.shape, bool) if mask is None else mask
        x, moe_index = block.embed(tokens, weights.embed, self.spec), 0
        for index, (layer, each) in enumerate(zip(self.spec.layers, weights.layers, strict=True)):
            x, new[f"layer_{index}"] = block.mix(x, cache[f"layer_{index}"], positions, valid, each, layer)
            if isinstance(layer.mlp, MoESpec):
                x = self._experts(x, tokens, valid, each, layer, moe_index)
                moe_index += 1
            else:
                x = block.dense(x, each, layer)
        logits = block.logits_of(x.reshape(-1, *x.shape[2:]), weights, self.spec)
        new["length"] = positions[:, 0] + valid.sum(1, dtype=jnp.int32)
        return logits.reshape(*tokens.shape, -1), new

    def _experts(
        self, x: Array, tokens: Array, valid: Array, weights: LayerWeights, layer: LayerSpec, index: int
    ) -> Array:
        assert isinstance(layer.mlp, MoESpec)
        assert isinstance(weights.mlp, MoEWeights)
        normed, mixing = block.moe_input(x, weights, layer)
        ids, shares = layer.mlp.router(normed, tokens.reshape(-1), weights.mlp.router)
        ids = jnp.where(valid.reshape(-1, 1), ids, -1)  # padding loads nothing
        y, state = apply_experts(
            normed, ids, shares, self.slots.state.get_value(), self.experts[index].get_value(), jnp.int32(index),
            config=self.slots.config,
        )  # fmt: skip
        self.slots.state.set_value(state)
        return block.moe_output(x, normed, mixing, y, weights, layer)


@partial(nnx.jit, donate_argnums=(0, 1))
def forward(
    model: OffloadedLM, cache: Cache, tokens: Int[Array, "B T"], pad_id: Int32[Array, ""] | int
) -> tuple[Float32[Array, "B V"], Cache]:
    """The logits after the last token of each row, and the cache. As bonsai has it, rows may be padded on the left with
    `pad_id`, the first time and later."""
    real = tokens != pad_id
    count, steps = real.sum(1, dtype=jnp.int32), jnp.arange(tokens.shape[1], dtype=jnp.int32)
    rows = jnp.take_along_axis(tokens, (real.argmax(1)[:, None] + steps) % tokens.shape[1], axis=1)
    logits, cache = model(rows, cache["length"][:, None] + steps, cache, steps < count[:, None])
    return jnp.take_along_axis(logits, (count - 1)[:, None, None], axis=1)[:, 0], cache


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _empty(spec: Any, batch: int, capacity: int, dtype: np.dtype) -> tuple[Any, ...]:
    return empty_sequences(spec=spec, batch=batch, capacity=capacity, dtype=dtype).states
