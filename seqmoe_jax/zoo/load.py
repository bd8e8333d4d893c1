"""From a Flax NNX module to a model of ours: the dense weights on the device, the experts in the host pool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from pallas_kernels.layout import ExpertLayout
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.experts.host_pool import Pool, Work, build_pool, workers
from seqmoe_jax.host_memory import Progress
from seqmoe_jax.loading import activation_dtype
from seqmoe_jax.models.families import spec_from_config
from seqmoe_jax.models.model import Model
from seqmoe_jax.models.norms import RMSNorm
from seqmoe_jax.models.spec import ModelSpec
from seqmoe_jax.models.tensors import take_from
from seqmoe_jax.models.weights import ModelWeights
from seqmoe_jax.pinned import bytes_of
from seqmoe_jax.zoo.config import config_of
from seqmoe_jax.zoo.layouts import Layout, layout_of
from seqmoe_jax.zoo.module import ModuleArrays
from seqmoe_jax.zoo.places import expert_dtype, find_places


class NNXModel:
    """A module whose arrays have all been found and checked, and none of which has been taken yet."""

    def __init__(
        self,
        module: nnx.Module,
        layout: str | Mapping[str, Any],
        config: Mapping[str, Any],
        *,
        name: str | None = None,
        release: bool,
    ):
        """Raises `ConfigError` or `CheckpointError`, with paths of the module."""
        if not isinstance(module, nnx.Module):
            raise ConfigError(f"expected a Flax NNX module, got {type(module).__name__}; a directory is read by `load`")
        chosen = layout_of(layout)
        self.name, self.release = name or type(module).__name__, release
        self.arrays = ModuleArrays(module, release=release)
        self.spec = spec_of(module, chosen, config, self.arrays)
        self.places = find_places(self.arrays, self.spec, chosen)

    def dtype_here(self, dtype: str | None, device: jax.Device) -> np.dtype:
        """Dtype of activations and dense weights: as asked for, else the module's own."""
        if dtype is None and self.spec.dtype.name in ("float32", "bfloat16"):
            return self.spec.dtype
        return activation_dtype(self.spec, device, dtype)

    def load(self, dtype: np.dtype, device: jax.Device, progress: Progress | None = None) -> Model:
        """Takes the arrays out of the module, one by one."""
        weights, layers = self._dense(dtype, device), self._expert_layers()
        pools = stacked_pool(self.spec.expert_layout, layers, len(self.places.experts), device, progress)
        return Model(spec=self.spec, weights=weights, pools=pools, name=self.name)

    def refill(self, model: Model) -> Model:
        """Writes the experts into a model's pools, which keep their place; returns it with the dense weights anew.

        No program may read the pools meanwhile.
        """
        device = next(iter(model.weights.embed.devices()))
        weights, layout = self._dense(np.dtype(model.weights.embed.dtype), device), self.spec.expert_layout
        for pool, fields in zip(model.pools, self._expert_layers(), strict=True):
            memory = bytes_of(pool)
            with ThreadPoolExecutor(workers()) as executor:
                list(executor.map(lambda e, f=fields, m=memory: _pack(layout, f, e, m), range(pool.shape[0])))
        return replace(model, weights=weights)

    def _dense(self, dtype: np.dtype, device: jax.Device) -> ModelWeights:
        def dense(name: str) -> Array:
            place = self.places.dense[name]
            wanted = self.spec.tensors()[name].dtype or dtype
            # Always a copy: the module's buffers go, or belong to whoever goes on with it.
            array = np.array(place.of(self.arrays.read(place.path)), wanted, order="C")
            self.arrays.drop(place.path)
            return jax.device_put(array, device)

        return self.spec.assemble(take_from(dense))

    def _expert_layers(self) -> Iterator[Mapping[str, np.ndarray]]:
        for layer in self.places.experts:
            paths = dict.fromkeys(place.path for place in layer.values())
            read = {path: self.arrays.read(path) for path in paths}
            yield {name: place.of(read[place.path]) for name, place in layer.items()}
            read.clear()
            self.arrays.drop(*paths)


def stacked_pool(
    layout: ExpertLayout,
    layers: Iterable[Mapping[str, np.ndarray]],
    count: int,
    device: jax.Device,
    progress: Progress | None = None,
) -> Pool:
    """A host pool of `count` layers from fields `[E, *field.shape]` of all experts, layer by layer.

    A layer is asked for when the one before it has been packed: no two are read at once.
    """
    pools: list[Pool] = []
    for index, fields in enumerate(layers):
        experts = len(next(iter(fields.values())))
        size = experts * layout.block_bytes

        def told(done: int, _: int, before: int = index * size, size: int = size) -> None:
            if progress is not None:
                progress(before + done, count * size)

        packing = [partial(_pack, layout, fields, expert) for expert in range(experts)]
        pools.append(_one_layer(layout, packing, device, told))
    return tuple(chain.from_iterable(pools))


def _one_layer(layout: ExpertLayout, packing: Sequence[Work], device: jax.Device, progress: Progress) -> Pool:
    experts = len(packing)
    size = experts * layout.block_bytes
    return build_pool(
        layout, (0,), lambda _: packing, num_experts=experts, device=device, total=size, progress=progress
    )


def _pack(layout: ExpertLayout, fields: Mapping[str, np.ndarray], expert: int, view: np.ndarray) -> int:
    """One expert into its place among the bytes of its layer."""
    for field in layout.fields:
        start = expert * layout.block_bytes + field.offset
        view[start : start + field.nbytes].view(field.dtype).reshape(field.shape)[...] = fields[field.name][expert]
    return layout.block_bytes


def spec_of(module: nnx.Module, layout: Layout, given: Mapping[str, Any], arrays: ModuleArrays) -> ModelSpec:
    """What the module's configuration says, with the dtypes that its arrays have."""
    config = config_of(module, layout, given)
    try:
        spec = spec_from_config(config)
    except ConfigError as error:
        raise ConfigError(f"{type(module).__name__}, its configuration as a {error}") from None
    embed = next((path for path in layout.candidates("embed") if path.removesuffix(".T") in arrays.paths), None)
    dtype = spec.dtype if embed is None else arrays.dtype(embed.removesuffix(".T"))
    spec = replace(spec, dtype=dtype, expert_dtype=expert_dtype(arrays, layout, spec), expert_scales=None)
    return with_late_norms(spec) if layout.late_norms else spec


def with_late_norms(spec: ModelSpec) -> ModelSpec:
    """The spec with norms that round after their weight has multiplied."""

    def late(norm: RMSNorm) -> RMSNorm:
        return replace(norm, rounding="late")

    def mixer(each: Any) -> Any:
        return replace(each, norm=late(each.norm)) if isinstance(getattr(each, "norm", None), RMSNorm) else each

    layers = tuple(replace(layer, norm=late(layer.norm), mixer=mixer(layer.mixer)) for layer in spec.layers)
    return replace(spec, norm=late(spec.norm), layers=layers)
