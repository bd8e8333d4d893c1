"""`offload`: the MoE blocks of a model of a zoo become `OffloadedMoE`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from pallas_kernels.backend import resolve
from pallas_kernels.layout import ExpertLayout
from seqmoe_jax.errors import ConfigError, ResidencyError
from seqmoe_jax.experts.cache import CacheConfig, keep
from seqmoe_jax.experts.policy import rule_of
from seqmoe_jax.models.spec import ModelSpec, MoESpec
from seqmoe_jax.models.tensors import take_from
from seqmoe_jax.models.weights import MoEWeights
from seqmoe_jax.nnx.block import OffloadedMoE
from seqmoe_jax.nnx.slots import ExpertSlots
from seqmoe_jax.options import EngineOptions, Residency
from seqmoe_jax.zoo.layouts import Paths, Zoo, layout_of
from seqmoe_jax.zoo.load import spec_of, stacked_pool
from seqmoe_jax.zoo.module import ModuleArrays
from seqmoe_jax.zoo.places import BlockPlaces, find_block

Where = Callable[[str, nnx.Module], bool]
POLICIES = ("lru", "lfu")


def offload(
    model: nnx.Module,
    layout: Zoo | str | Mapping[str, Paths] = "tunix",
    *,
    residency: Residency = 0.45,
    where: Where | None = None,
    policy: Literal["lru", "lfu"] | str = "lru",
    config: Mapping[str, Any] | None = None,
    kernels: Any = None,
) -> ExpertSlots:
    """Puts an `OffloadedMoE` in the place of every MoE block of a model, in which all else stays as it is.

    The experts go layer by layer into pinned host memory, and leave the module. What the model then needs of device
    memory is its other weights and the slots.

    Args:
      model: a Flax NNX model whose MoE blocks are named as a layout says; see `from_nnx`.
      residency: slots, as a share of the experts of the blocks that are replaced; "least": K.
      where: which blocks: `where(path, block)`, with paths like `layers.3.mlp`. Default: all.
      policy: which expert leaves when a missing one needs its slot, "lru" or "lfu".
      config: as of `from_nnx`.
      kernels: as of `EngineOptions`.

    Returns the slots, which know their `hit_rate`. Decode with a program that donates the model,
    `nnx.jit(step, donate_argnums=0)`; one that does not is refused with an `EngineError` at its second call.

    Raises `CheckpointError` with the module's own paths, `ConfigError` or `ResidencyError`; then nothing has changed.
    """
    if not isinstance(model, nnx.Module):
        raise ConfigError(f"expected a Flax NNX module, got {type(model).__name__}")
    chosen, arrays, device = layout_of(layout), ModuleArrays(model, release=True), jax.devices()[0]
    spec = spec_of(model, chosen, config or {}, arrays)
    found = [find_block(arrays, spec, chosen, index) for index in spec.moe_layers]
    blocks = [block for block in found if where is None or where(block.path, _at(model, block.path))]
    if not blocks:
        paths = ", ".join(block.path for block in found[:3])
        raise ConfigError(f"where: expected at least one of the {len(found)} MoE blocks ({paths}, ...), got none")
    slots = ExpertSlots(cache_config(spec, len(blocks), residency, policy, kernels), device)
    moe = {block.path: spec.layers[index].mlp for index, block in zip(spec.moe_layers, found, strict=True)}
    for index, block in enumerate(blocks):
        each = moe[block.path]
        assert isinstance(each, MoESpec)
        new = OffloadedMoE(each, _dense(arrays, block, each, device), _pool(arrays, block, spec.expert_layout, device),
                           slots, index=index, beside=chosen.beside)  # fmt: skip
        _replace(model, block.path, new)
        if not slots.config.managed:
            fill(slots, new.experts.get_value(), index)
    return slots


def _pool(arrays: ModuleArrays, block: BlockPlaces, layout: ExpertLayout, device: jax.Device) -> jax.Array:
    """The experts of a block in pinned host memory; they leave the module."""
    paths = {place.path for place in block.experts.values()}
    read = {path: arrays.read(path) for path in paths}
    fields = {name: place.of(read[place.path]) for name, place in block.experts.items()}
    (pool,) = stacked_pool(layout, [fields], 1, device)
    fields.clear()
    read.clear()
    arrays.drop(*paths)
    return in_jax_memory(pool, device)


def in_jax_memory(pool: jax.Array, device: jax.Device) -> jax.Array:
    """A copy of a pool in pinned host memory of JAX's own: it is donated with the model, and memory that we lent JAX
    would be copied then."""
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    return jax.device_put(pool, pinned, may_alias=False).block_until_ready()


def _dense(arrays: ModuleArrays, block: BlockPlaces, moe: MoESpec, device: jax.Device) -> MoEWeights:
    """Router and shared expert, in the dtype that the module has them in."""

    def take(name: str) -> jax.Array:
        place = block.dense[name]
        return jax.device_put(np.array(place.of(arrays.read(place.path)), order="C"), device)

    def part(prefix: str) -> Any:
        return take_from(lambda name: take(f"{prefix}.{name}"))

    shared = None if moe.shared is None else moe.shared.assemble(part("shared"))
    return MoEWeights(router=moe.router.assemble(part("router")), shared=shared)


def cache_config(spec: ModelSpec, layers: int, residency: Residency, policy: Any, kernels: Any) -> CacheConfig:
    """The slots of so many MoE layers. Raises `ConfigError` or `ResidencyError`."""
    if policy not in POLICIES:
        raise ConfigError(f"policy must be one of {', '.join(POLICIES)} inside a Flax model, got {policy!r}")
    EngineOptions(residency=residency, kernels=kernels)
    moe = spec.moe
    keys = layers * moe.num_experts
    slots = moe.top_k if residency == "least" else int(float(residency) * keys + 1e-9)
    if slots < moe.top_k:
        raise ResidencyError(
            f"residency {residency} gives {slots} of {keys} experts a slot; the least is {moe.top_k} slots "
            f"(residency {moe.top_k / keys:.4f}) for K={moe.top_k}"
        )
    return CacheConfig(
        layout=spec.expert_layout, layers=layers, experts=moe.num_experts, slots=slots, rule=rule_of(policy),
        managed=slots < keys, implementation=resolve(kernels),
    )  # fmt: skip


def fill(slots: ExpertSlots, pool: jax.Array, index: int) -> None:
    """All experts of a layer into their own slots."""
    state, wanted = slots.state.get_value(), np.ones(slots.config.experts, bool)
    cache = _keep(state.cache, pool, wanted, np.int32(index), config=slots.config)
    slots.state.set_value(state._replace(cache=cache))


def _at(model: nnx.Module, path: str) -> Any:
    here: Any = model
    for name in path.split("."):
        here = here[int(name)] if name.isdigit() else getattr(here, name)
    return here


def _replace(model: nnx.Module, path: str, block: nnx.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(_at(model, parent) if parent else model, name, block)


_keep = partial(jax.jit, static_argnames="config", donate_argnums=0)(keep)
