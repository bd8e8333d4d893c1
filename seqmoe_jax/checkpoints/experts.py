"""In which format experts are held, from what the files have of them. `config.json` may say less, or otherwise."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from functools import reduce

import numpy as np

from pallas_kernels.layout import FP4, FP8
from seqmoe_jax.checkpoints.safetensors import Checkpoint
from seqmoe_jax.checkpoints.scales import scales_of
from seqmoe_jax.checkpoints.sources import NameMap
from seqmoe_jax.models.quantization import SCALES, holds
from seqmoe_jax.models.spec import ModelSpec

log = logging.getLogger("seqmoe_jax")

MATRICES = ("gate", "up", "down")
Expert = tuple[int, int]  # number of the layer in the model, and of the expert in it


def with_stored_experts(
    spec: ModelSpec, checkpoint: Checkpoint, names: NameMap, activations: np.dtype | type
) -> ModelSpec:
    """The spec with experts in a format that holds what the files have, exactly.

    FP8 stays as it is. Beside experts that are not, all have the dtype of those, which holds the values of FP8, and the
    scales beside them. FP8 whose scales no format has is dequantised to the dtype of the `activations`, as dense
    weights are.
    """
    if spec.expert_dtype == FP4:
        return spec
    blocks: set[tuple[int | None, int | None]] = set()
    others: dict[Expert, np.dtype] = {}
    for layer, experts in zip(names.layer_index, names.experts, strict=True):
        for expert, sources in enumerate(experts):
            for source in (sources[name] for name in MATRICES):
                stored = checkpoint.info(source.tensor).dtype
                if stored == FP8:
                    blocks.add(scales_of(checkpoint, names, source).within(source.part_shape))
                else:
                    others[layer, expert] = stored
    if not blocks:
        if spec.expert_scales is None:
            return spec
        return replace(spec, expert_dtype=_widest(others.values()), expert_scales=None)
    kind = next((kind for kind in SCALES if all(holds(kind, block) for block in blocks)), None)
    if kind is None:
        dtype = _widest([np.dtype(activations), *others.values()])
        said = " and ".join(f"{rows or 'all'} x {cols or 'all'}" for rows, cols in sorted(blocks, key=str))
        log.warning(
            "%s: experts are dequantised to %s: FP8 with a scale for %s elements has no kernel",
            *(checkpoint.directory, dtype, said),
        )
        return replace(spec, expert_dtype=dtype, expert_scales=None)
    if not others:
        return replace(spec, expert_dtype=FP8, expert_scales=kind)
    dtype = _widest(others.values())
    log.warning(
        "%s: experts of %s are %s, the others FP8: all are held as %s, FP8 with its scales beside, so that every value "
        "is that of the files; that is %d bytes for each of FP8",
        *(checkpoint.directory, _listed(others.keys(), spec.moe.num_experts), dtype, dtype, dtype.itemsize),
    )
    return replace(spec, expert_dtype=dtype, expert_scales=kind)


def _widest(dtypes: Iterable[np.dtype]) -> np.dtype:
    """One that holds the values of all, if not more than float32."""
    widest = reduce(np.promote_types, dtypes)
    return np.dtype(np.float32) if widest.itemsize > 4 else widest


def _listed(experts: Set[Expert], per_layer: int) -> str:
    by_layer: dict[int, list[int]] = {}
    for layer, expert in sorted(experts):
        by_layer.setdefault(layer, []).append(expert)
    said = [
        f"layer {layer}" if len(which) == per_layer else f"layer {layer} ({_first(which)} of {per_layer})"
        for layer, which in by_layer.items()
    ]
    return _first(said)


def _first(items: Sequence[object]) -> str:
    return ", ".join(map(str, items[:6])) + (f" and {len(items) - 6} more" if len(items) > 6 else "")
