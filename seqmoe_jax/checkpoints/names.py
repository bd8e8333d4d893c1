"""Which checkpoint tensor gives which model tensor: a spec's tensors under its family's names."""

from __future__ import annotations

from collections.abc import Iterator, Set

from seqmoe_jax.checkpoints.fp8 import DEFAULT_BLOCK
from seqmoe_jax.checkpoints.sources import NameMap, Source, check_names
from seqmoe_jax.models.families import FAMILIES
from seqmoe_jax.models.naming import ExpertNames
from seqmoe_jax.models.spec import ModelSpec

__all__ = ["NameMap", "Source", "check_names", "names_of"]


def names_of(spec: ModelSpec, available: Set[str]) -> NameMap:
    """The name map of a model. `available`, the checkpoint's names, tells its dialect and which layout its
    experts have.

    Model names are those of `ModelSpec.tensors`. Experts are counted by MoE layer, not by layer; their fields are
    those of the expert layout.
    """
    family = FAMILIES[spec.family]
    dialects = (family.names, *family.dialects)
    names = next((names for names in dialects if names.model["embed"] in available), family.names)
    dense = {}
    for ours, tensor in spec.tensors().items():
        if ours.startswith("layers."):
            _, index, part = ours.split(".", 2)
            theirs = names.prefix.format(index=index) + names.layer[part]
        else:
            theirs = names.model[ours]
        integers = tensor.dtype is not None and tensor.dtype.kind == "i"
        dense[ours] = Source(tensor=theirs, shape=tensor.shape, integers=integers)
    experts = tuple(
        tuple(_experts(spec, names.prefix.format(index=index), names.experts, available)) for index in spec.moe_layers
    )
    ignored = tuple(pattern.format(layers=len(spec.layers)) for pattern in names.ignored)
    return NameMap(
        dense=dense,
        experts=experts,
        layer_index=spec.moe_layers,
        block=spec.fp8_block or DEFAULT_BLOCK,
        scale_suffix=names.scale_suffix,
        ignored=(*ignored, *((names.model["lm_head"],) if spec.tied else ())),
    )


def _experts(spec: ModelSpec, prefix: str, names: ExpertNames, available: Set[str]) -> Iterator[dict[str, Source]]:
    """Sources of one layer's experts: one tensor each, or parts of tensors fused over experts."""
    count, width, hidden = spec.moe.experts, spec.moe.width, spec.hidden
    gate_up, down = prefix + names.fused_gate_up, prefix + names.fused_down
    for expert in range(count):
        if gate_up in available:
            both = (count, 2 * width, hidden)
            yield {
                "gate": Source(tensor=gate_up, shape=both, expert=expert, rows=(0, width)),
                "up": Source(tensor=gate_up, shape=both, expert=expert, rows=(width, 2 * width)),
                "down": Source(tensor=down, shape=(count, hidden, width), expert=expert),
            }
        else:
            yield {
                "gate": Source(tensor=prefix + names.gate.format(expert=expert), shape=(width, hidden)),
                "up": Source(tensor=prefix + names.up.format(expert=expert), shape=(width, hidden)),
                "down": Source(tensor=prefix + names.down.format(expert=expert), shape=(hidden, width)),
            }
