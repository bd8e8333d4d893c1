"""Which checkpoint tensor gives which model tensor: a spec's tensors under its family's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from functools import partial

from pallas_kernels.layout import FP4, FP4_BLOCK, FP8_BLOCK
from seqmoe_jax.checkpoints.sources import NameMap, Source
from seqmoe_jax.models.families import FAMILIES
from seqmoe_jax.models.naming import ExpertNames, Names
from seqmoe_jax.models.spec import ModelSpec, MoESpec
from seqmoe_jax.models.tensors import Tensors


def names_of(spec: ModelSpec, available: Set[str]) -> NameMap:
    """The name map of a model. `available` are the checkpoint's names: they show which of the family's dialects it is
    written in, and whether its experts are fused.

    Model names are those of `ModelSpec.tensors`. Experts are counted by MoE layer, not by layer; their fields are
    those of the expert layout.
    """
    tensors = spec.tensors()
    names = min(_spellings(spec, available), key=lambda names: len(set(_dense(names, tensors)) - available))
    dense = {
        ours: Source(tensor=theirs, shape=tensor.shape, integers=tensor.dtype is not None and tensor.dtype.kind == "i")
        for theirs, (ours, tensor) in zip(_dense(names, tensors), tensors.items(), strict=True)
    }
    embed, head = names.model["embed"], names.model["lm_head"]
    if spec.tied and embed not in available and head in available:  # one of the two is enough, whichever
        dense["embed"] = replace(dense["embed"], tensor=head)
    moe, fp4 = spec.moe, spec.expert_dtype == FP4
    experts = tuple(
        tuple(_experts(spec.hidden, moe, fp4, names.prefix.format(index=index), names.experts, available))
        for index in spec.moe_layers
    )
    quantization = spec.quantization
    rows, cols = quantization.block if quantization is not None else (None, None)
    ignored = tuple(pattern.format(layers=len(spec.layers)) for pattern in names.ignored)
    return NameMap(
        dense=dense,
        experts=experts,
        layer_index=spec.moe_layers,
        block=(rows, cols) if rows and cols else (FP8_BLOCK, FP8_BLOCK),
        activations=quantization is not None and quantization.activations,
        ignored=(*ignored, *((f"*{names.model['lm_head']}",) if spec.tied else ())),
    )


def _spellings(spec: ModelSpec, available: Set[str]) -> Iterator[Names]:
    """The family's dialects below every root that the checkpoint may have; the usual one first."""
    family = FAMILIES[spec.family]
    for names in (family.names, *family.dialects):
        yield names.below("model.", "")
        tail = names.model["embed"].removeprefix("{root}")
        if tail != names.model["embed"]:
            for root in sorted(name.removesuffix(tail) for name in available if ("." + name).endswith("." + tail)):
                # The head may stand beside the decoder, in the model that has both, or by itself.
                yield names.below(root, "")
                yield names.below(root, root.removesuffix("model.") if root.endswith(".model.") else root)


def _dense(names: Names, tensors: Tensors) -> Iterator[str]:
    """What a checkpoint calls these tensors, in their order."""
    for ours in tensors:
        if ours.startswith("layers."):
            _, index, part = ours.split(".", 2)
            yield names.prefix.format(index=index) + names.layer[part]
        else:
            yield names.model[ours]


def _experts(
    hidden: int, moe: MoESpec, fp4: bool, prefix: str, names: ExpertNames, available: Set[str]
) -> Iterator[dict[str, Source]]:
    """Sources of the fields of one layer's experts, in the form that the checkpoint has them."""
    matrices = {"gate": (moe.width, hidden), "up": (moe.width, hidden), "down": (hidden, moe.width)}
    fused = prefix + names.fused_gate_up + ("_blocks" if fp4 else "")
    split = names.split and fused not in available
    for expert in range(moe.num_experts):
        if split:
            yield _split(matrices, fp4, prefix, names, expert)
        else:
            yield _fused(matrices, moe, fp4, prefix, names, expert)


_Matrices = Mapping[str, tuple[int, int]]  # name -> [out, in]


def _split(matrices: _Matrices, fp4: bool, prefix: str, names: ExpertNames, expert: int) -> dict[str, Source]:
    """One tensor per expert and matrix."""
    sources = {}
    for name, (rows, cols) in matrices.items():
        tensor = prefix + getattr(names, name).format(expert=expert)
        if fp4:
            end, replacement = names.scale_suffix
            scale = tensor.removesuffix(end) + replacement
            sources[name] = Source(tensor=tensor, shape=(rows, cols // 2), packed=True)
            sources[f"{name}_scale"] = Source(tensor=scale, shape=(rows, cols // FP4_BLOCK), packed=True)
        else:
            sources[name] = Source(tensor=tensor, shape=(rows, cols))
    return sources


def _fused(
    matrices: _Matrices, moe: MoESpec, fp4: bool, prefix: str, names: ExpertNames, expert: int
) -> dict[str, Source]:
    """Parts of tensors that hold all experts of a layer."""
    count, width = moe.num_experts, moe.width
    halves = {"gate": ((0, width), 1), "up": ((width, 2 * width), 1)}
    alternate = {"gate": ((0, 2 * width), 2), "up": ((1, 2 * width), 2)}
    sources = {}
    for name, (rows, cols) in matrices.items():
        tensor = prefix + (names.fused_down if name == "down" else names.fused_gate_up)
        part, step = (None, 1) if name == "down" else (alternate if names.interleaved else halves)[name]
        height = rows if name == "down" else 2 * rows

        source = partial(Source, expert=expert, rows=part, step=step)
        if fp4:
            blocks = cols // FP4_BLOCK
            sources[name] = source(
                tensor=f"{tensor}_blocks", shape=(count, height, blocks, FP4_BLOCK // 2), packed=True
            )
            sources[f"{name}_scale"] = source(tensor=f"{tensor}_scales", shape=(count, height, blocks), packed=True)
        elif names.transposed:
            sources[name] = source(tensor=tensor, shape=(count, cols, height), transposed=True)
        else:
            sources[name] = source(tensor=tensor, shape=(count, height, cols))
        if moe.bias:
            sources[f"{name}_bias"] = source(tensor=f"{tensor}_bias", shape=(count, height))
    return sources
