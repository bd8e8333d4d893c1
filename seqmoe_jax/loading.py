"""From a checkpoint directory or a preset to a `Model` in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array

from seqmoe_jax.checkpoints.check import check_names
from seqmoe_jax.checkpoints.experts import with_stored_experts
from seqmoe_jax.checkpoints.names import names_of
from seqmoe_jax.checkpoints.read import iter_dense
from seqmoe_jax.checkpoints.resolve import read_config, resolve_model
from seqmoe_jax.checkpoints.safetensors import open_checkpoint
from seqmoe_jax.checkpoints.stored import as_stored
from seqmoe_jax.errors import CheckpointError, ConfigError
from seqmoe_jax.experts.host_pool import load_host_pool
from seqmoe_jax.experts.random_pool import random_host_pool
from seqmoe_jax.forecast.trained import TrainedPredictor
from seqmoe_jax.host_memory import Progress
from seqmoe_jax.inputs import read_json
from seqmoe_jax.models.families import left_out, spec_from_config
from seqmoe_jax.models.model import Model
from seqmoe_jax.models.spec import ModelSpec
from seqmoe_jax.models.tensors import take_from
from seqmoe_jax.models.weights import ModelWeights

Check = Callable[[ModelSpec, np.dtype, jax.Device], None]  # raises where a model of the spec cannot be loaded there


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
    check: Check | None = None,
) -> tuple[Model, Path]:
    """A checkpoint into memory: dense weights onto the device, each expert as one block into pinned host memory.

    Returns the model and its directory (for the tokenizer). Raises `CheckpointError` or `ConfigError`; nothing large
    is read before names, shapes and dtypes have been checked, and whatever `check` has against it.
    """
    device = device or jax.devices()[0]
    directory = resolve_model(model)
    config = read_config(directory)
    spec = spec_from_config(config)
    with open_checkpoint(directory) as checkpoint:
        spec = as_stored(spec, checkpoint)
        names = names_of(spec, checkpoint.names)
        try:
            check_names(checkpoint, names)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{left_out(config)}") from None
        chosen = activation_dtype(spec, device, dtype)
        spec = with_stored_experts(spec, checkpoint, names, chosen)
        if check is not None:
            check(spec, chosen, device)
        dtypes = {name: tensor.dtype or chosen for name, tensor in spec.tensors().items()}
        dense = {name: jax.device_put(array, device) for name, array in iter_dense(checkpoint, names, dtypes=dtypes)}
        weights = spec.assemble(take_from(dense.pop))  # each is dropped once it is in the tree
        pools = load_host_pool(
            checkpoint,
            names,
            spec.expert_layout,
            num_layers=len(spec.moe_layers),
            num_experts=spec.moe.num_experts,
            device=device,
            progress=progress,
        )
    return Model(spec=spec, weights=weights, pools=pools, name=str(model)), directory


def load_predictor(directory: Path, beside: Array) -> TrainedPredictor:
    """A predictor into the device memory that the array `beside` lies in, matrices in that array's dtype."""
    from seqmoe_jax.forecast import store
    from seqmoe_jax.forecast.by_rows import by_rows

    config, weights = store.load(directory, dtype=beside.dtype)
    weights = by_rows(jax.device_put(weights, next(iter(beside.devices()))))
    return TrainedPredictor(config=config, weights=weights, name=directory.name)


def find_and_load_predictor(
    choice: str | Path, model: Model, *, trained_on: str | None = None
) -> TrainedPredictor | None:
    """The predictor that "auto", "none" or a directory means for a model, in device memory beside its weights.

    `trained_on` names the model whose routing is replayed, where that is not `model`'s own. Raises `PredictorError`.
    """
    from seqmoe_jax.forecast.store import choose_predictor

    spec = model.spec
    sizes = dict(layers=len(spec.moe_layers), experts=spec.moe.num_experts, active=spec.moe.top_k)
    found = choose_predictor(choice, trained_on or model.name, **sizes)
    return None if found is None else load_predictor(found, model.weights.embed)


def random_model(
    config: dict[str, Any] | str | Path,
    *,
    seed: int = 0,
    dtype: str | None = None,
    device: jax.Device | None = None,
    name: str = "random",
    progress: Progress | None = None,
    check: Check | None = None,
) -> Model:
    """A model of the given `config.json` (contents or path) with random weights: real shapes, meaningless text.

    Nothing large is allocated before `check` has raised what it has against it.
    """
    device = device or jax.devices()[0]
    spec = spec_from_config(config if isinstance(config, dict) else read_json(config))
    chosen = activation_dtype(spec, device, dtype)
    if check is not None:
        check(spec, chosen, device)
    with jax.default_device(device):
        weights = random_weights(jax.random.key(seed), spec=spec, dtype=chosen)
    pools = random_host_pool(
        spec.expert_layout,
        num_layers=len(spec.moe_layers),
        num_experts=spec.moe.num_experts,
        device=device,
        seed=seed,
        progress=progress,
    )
    return Model(spec=spec, weights=weights, pools=pools, name=name)


def random_weights(key: Array, *, spec: ModelSpec, dtype: np.dtype) -> ModelWeights:
    """Dense weights of unit-variance maps: normal with standard deviation 1 / sqrt(inputs), norms at one."""
    tensors, count = spec.tensors(), iter(range(10**9))

    def make(name: str) -> Array:
        tensor, part = tensors[name], jax.random.fold_in(key, next(count))
        if tensor.init == "normal":
            values = jax.random.normal(part, tensor.shape, jnp.float32) * tensor.shape[-1] ** -0.5
        elif tensor.init == "cycle":
            values = (jnp.arange(math.prod(tensor.shape)) % tensor.period).reshape(tensor.shape)
        else:
            values = jnp.full(tensor.shape, 1.0 if tensor.init == "ones" else 0.0)
        return values.astype(tensor.dtype or dtype)

    return spec.assemble(take_from(make))
