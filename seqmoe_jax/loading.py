"""From a checkpoint directory or a preset to a `Model` in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array

from seqmoe_jax.checkpoints.names import check_names, names_of
from seqmoe_jax.checkpoints.read import iter_dense
from seqmoe_jax.checkpoints.resolve import read_config, resolve_model
from seqmoe_jax.checkpoints.safetensors import open_checkpoint
from seqmoe_jax.engine import Model, Predictor
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.experts.host_pool import load_host_pool, random_host_pool
from seqmoe_jax.models.spec import ModelSpec, MoESpec, spec_from_config
from seqmoe_jax.models.weights import (
    AttentionWeights,
    DenseWeights,
    LayerWeights,
    ModelWeights,
    RouterWeights,
)

Progress = Callable[[int, int], None]  # bytes done, bytes in all


def activation_dtype(spec: ModelSpec, device: jax.Device, dtype: str | None = None) -> np.dtype:
    """Dtype of activations and dense weights: as asked for, else float32 on a CPU and bfloat16 elsewhere.

    float32 checkpoints stay float32 everywhere.
    """
    known = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
    if dtype is not None:
        if dtype not in known:
            raise ConfigError(f"unknown dtype {dtype!r}: expected one of {', '.join(known)}")
        return known[dtype]
    bf16 = device.platform != "cpu" and spec.dtype == known["bfloat16"]
    return known["bfloat16"] if bf16 else known["float32"]


def load_model(
    model: str | Path,
    *,
    dtype: str | None = None,
    device: jax.Device | None = None,
    progress: Progress | None = None,
) -> tuple[Model, Path]:
    """A checkpoint into memory: dense weights onto the device, each expert as one block into pinned host memory.

    Returns the model and its directory (for the tokenizer). Raises `CheckpointError` or `ConfigError`; nothing large
    is read before names, shapes and dtypes have been checked.
    """
    device = device or jax.devices()[0]
    directory = resolve_model(model)
    spec = spec_from_config(read_config(directory))
    with open_checkpoint(directory) as checkpoint:
        names = names_of(spec, checkpoint.names)
        check_names(checkpoint, names)
        dense = {
            name: jax.device_put(array, device)
            for name, array in iter_dense(checkpoint, names, dtype=activation_dtype(spec, device, dtype))
        }
        weights = assemble(dense, spec)
        pools = load_host_pool(
            checkpoint,
            names,
            spec.expert_layout,
            num_layers=len(spec.moe_layers),
            num_experts=spec.moe.experts,
            device=device,
            progress=progress,
        )
    return Model(spec=spec, weights=weights, pools=pools, name=str(model)), directory


def load_predictor(directory: Path, beside: Array, *, stem: str = "predictor") -> Predictor:
    """A predictor into the device memory that the array `beside` lies in, matrices in that array's dtype."""
    from seqmoe_jax.forecast import store

    config, weights = store.load(directory, stem=stem, dtype=beside.dtype)
    return Predictor(
        config=config, weights=jax.device_put(weights, next(iter(beside.devices()))), name=directory.name
    )


def random_model(
    config: dict[str, Any] | str | Path,
    *,
    seed: int = 0,
    dtype: str | None = None,
    device: jax.Device | None = None,
    name: str = "random",
    progress: Progress | None = None,
) -> Model:
    """A model of the given `config.json` (contents or path) with random weights: real shapes, meaningless text."""
    device = device or jax.devices()[0]
    spec = spec_from_config(config if isinstance(config, dict) else json.loads(Path(config).read_text()))
    chosen = activation_dtype(spec, device, dtype)
    with jax.default_device(device):
        weights = _random_weights(jax.random.key(seed), spec=spec, dtype=chosen)
    pools = random_host_pool(
        spec.expert_layout,
        num_layers=len(spec.moe_layers),
        num_experts=spec.moe.experts,
        device=device,
        seed=seed,
        progress=progress,
    )
    return Model(spec=spec, weights=weights, pools=pools, name=name)


def assemble(dense: dict[str, Array], spec: ModelSpec) -> ModelWeights:
    """Tensors by model name -> the tree that the programs take. Consumes `dense`, so nothing is held twice for long."""

    def take(*names: str) -> Array:
        arrays = [dense.pop(name) for name in names]
        return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)

    layers = []
    for index, layer in enumerate(spec.layers):
        at = f"layers.{index}."
        mlp: RouterWeights | DenseWeights
        if isinstance(layer.mlp, MoESpec):
            mlp = RouterWeights(router=take(at + "router"))
        else:
            mlp = DenseWeights(gate_up=take(at + "mlp.gate", at + "mlp.up"), down=take(at + "mlp.down"))
        attention = AttentionWeights(
            qkv=take(at + "attention.q", at + "attention.k", at + "attention.v"),
            o=take(at + "attention.o"),
            q_norm=take(at + "attention.q_norm"),
            k_norm=take(at + "attention.k_norm"),
        )
        norms = dict(attention_norm=take(at + "input_norm"), mlp_norm=take(at + "post_norm"))
        layers.append(LayerWeights(attention=attention, mlp=mlp, **norms))
    embed = take("embed")
    head = embed if spec.tied else take("lm_head")
    return ModelWeights(embed=embed, layers=tuple(layers), norm=take("final_norm"), head=head)


def _random_weights(key: Array, *, spec: ModelSpec, dtype: np.dtype) -> ModelWeights:
    """Dense weights of unit-variance maps: normal with standard deviation 1 / sqrt(inputs), norms at one."""
    count = iter(range(10**9))

    def normal(*shape: int) -> Array:
        part = jax.random.fold_in(key, next(count))
        return (jax.random.normal(part, shape, jnp.float32) * shape[-1] ** -0.5).astype(dtype)

    def ones(size: int) -> Array:
        return jnp.ones(size, dtype)

    layers = []
    for layer in spec.layers:
        a, mlp = layer.attention, layer.mlp
        attention = AttentionWeights(
            qkv=normal((a.heads + 2 * a.kv_heads) * a.head_dim, spec.hidden),
            o=normal(spec.hidden, a.heads * a.head_dim),
            q_norm=ones(a.head_dim),
            k_norm=ones(a.head_dim),
        )
        weights: RouterWeights | DenseWeights
        if isinstance(mlp, MoESpec):
            weights = RouterWeights(router=normal(mlp.experts, spec.hidden))
        else:
            weights = DenseWeights(gate_up=normal(2 * mlp.width, spec.hidden), down=normal(spec.hidden, mlp.width))
        norms = dict(attention_norm=ones(spec.hidden), mlp_norm=ones(spec.hidden))
        layers.append(LayerWeights(attention=attention, mlp=weights, **norms))
    embed = normal(spec.vocab, spec.hidden)
    head = embed if spec.tied else normal(spec.vocab, spec.hidden)
    return ModelWeights(embed=embed, layers=tuple(layers), norm=ones(spec.hidden), head=head)
