"""Which array of a module gives which tensor of ours, found and checked before any is taken."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from seqmoe_jax.errors import CheckpointError, ConfigError
from seqmoe_jax.models.families import FAMILIES
from seqmoe_jax.models.families.common import FLOATS
from seqmoe_jax.models.spec import ModelSpec, MoESpec
from seqmoe_jax.models.tensors import below
from seqmoe_jax.zoo.layouts import EXPERTS, Layout
from seqmoe_jax.zoo.module import ModuleArrays


@dataclass(frozen=True, kw_only=True)
class Place:
    """An array of the module. `shape` is ours: a vector, or `[out, in]`; for stacked experts, that of one of them.

    `by_rows`: the module has `[out, in]` too, else `[in, out]`. `part` and `step`: of its outputs only these, where an
    array holds two matrices.
    """

    path: str
    shape: tuple[int, ...]
    by_rows: bool
    stacked: int | None = None  # E, where all experts of a layer are in it
    start: int = 0
    step: int = 1
    parts: int = 1

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape can be it: each side of a matrix may be several axes."""
        if self.stacked is not None:
            if shape[:1] != (self.stacked,):
                return False
            shape = shape[1:]
        sides = self._stored
        if len(sides) == 1:
            return math.prod(shape) == sides[0] and len(shape) > 0
        return any((math.prod(shape[:cut]), math.prod(shape[cut:])) == sides for cut in range(1, len(shape)))

    @property
    def _stored(self) -> tuple[int, ...]:
        """The sides of the matrix (or vector) as the module has them."""
        whole = (self.shape[0] * self.parts, *self.shape[1:])
        return whole if self.by_rows else whole[::-1]

    @property
    def expected(self) -> str:
        sides = ["[out, in]" if self.by_rows else "[in, out]"] if len(self.shape) > 1 else []
        shape = [*([self.stacked] if self.stacked is not None else []), *self._stored]
        return " ".join([str(shape), *sides])

    def of(self, array: np.ndarray) -> np.ndarray:
        """The tensor, `[*shape]`, or `[E, *shape]` of stacked experts: a view of the module's array where it can be."""
        lead = () if self.stacked is None else (self.stacked,)
        matrix = array.reshape(*lead, *self._stored)
        if not self.by_rows and len(self.shape) > 1:
            matrix = matrix.swapaxes(-1, -2)
        if self.parts == 1:
            return matrix
        rows = slice(self.start, self.start + (self.shape[0] - 1) * self.step + 1, self.step)
        return matrix[(*(slice(None) for _ in lead), rows)]


@dataclass(frozen=True, kw_only=True)
class Places:
    """`dense[tensor]` and, for each MoE layer, `experts[moe_layer][field]`."""

    dense: Mapping[str, Place]
    experts: tuple[Mapping[str, Place], ...]

    def __iter__(self) -> Iterator[Place]:
        yield from self.dense.values()
        for layer in self.experts:
            yield from layer.values()


@dataclass(frozen=True, kw_only=True)
class BlockPlaces:
    """The MoE block of a layer: the module at `path`, and what is in it. `dense` has names like `router.weight`."""

    path: str
    dense: Mapping[str, Place]
    experts: Mapping[str, Place]


def find_places(arrays: ModuleArrays, spec: ModelSpec, layout: Layout) -> Places:
    """The place of every tensor of a model. Raises `CheckpointError` with the module's paths that are missing, of a
    wrong shape or dtype, or more than the model has."""
    dense = {name: _place(arrays, layout, name, tensor.shape, spec) for name, tensor in spec.tensors().items()}
    places = Places(dense=dense, experts=tuple(_experts(arrays, layout, index, spec) for index in spec.moe_layers))
    _check(arrays, list(places), arrays.paths, layout, spec)
    return places


def find_block(arrays: ModuleArrays, spec: ModelSpec, layout: Layout, index: int) -> BlockPlaces:
    """The MoE block of the layer of this number, whatever the rest of the model is like. Raises as `find_places`."""
    moe = spec.layers[index].mlp
    assert isinstance(moe, MoESpec)
    tensors = below("router", moe.router.tensors(spec.hidden))
    if moe.shared is not None:
        tensors |= below("shared", moe.shared.tensors(spec.hidden))
    dense = {
        name: _place(arrays, layout, f"layers.{index}.{name}", tensor.shape, spec) for name, tensor in tensors.items()
    }
    experts = _experts(arrays, layout, index, spec)
    places = [*dense.values(), *experts.values()]
    modules = [place.path.rpartition(".")[0].replace(".", "/") for place in places]
    path = os.path.commonpath(modules).replace("/", ".")
    _check(arrays, places, {each for each in arrays.paths if each.startswith(f"{path}.")}, layout, spec)
    return BlockPlaces(path=path, dense=dense, experts=experts)


def _check(arrays: ModuleArrays, places: Sequence[Place], there: Set[str], layout: Layout, spec: ModelSpec) -> None:
    """Raises where these are not exactly the arrays that are `there`."""
    missing, wrong, used = [], [], set()
    for place in places:
        if place.path not in arrays.paths:
            missing.append(place.path)
            continue
        used.add(place.path)
        shape, dtype = arrays.shape(place.path), arrays.dtype(place.path)
        if not place.fits(shape):
            wrong.append(f"{place.path} {list(shape)} for {place.expected}")
        elif dtype.name not in FLOATS:
            wrong.append(f"{place.path} of {dtype}")
    kinds = {"missing": missing, "of a wrong shape or dtype": wrong, "unexpected": sorted(there - used)}
    faults = [f"{len(set(which))} {what} ({_first(which)})" for what, which in kinds.items() if which]
    if faults:
        raise CheckpointError(
            f"layout {layout.name}: expected the {len({place.path for place in places})} arrays that a {spec.family} "
            f"model of this configuration has there, got {', '.join(faults)}; give config={{...}} where the "
            "configuration says otherwise, or a mapping as the layout"
        )


def expert_dtype(arrays: ModuleArrays, layout: Layout, spec: ModelSpec) -> np.dtype:
    """The dtype of the experts' arrays, which is that of their blocks. Raises `CheckpointError` where they differ."""
    candidates = [
        path.removesuffix(".T")
        for index in spec.moe_layers
        for name in ("gate", "up", "gate_up", "down")
        for path in layout.candidates(f"layers.{index}.experts.{name}")
    ]
    found = {arrays.dtype(path): path for path in candidates if path in arrays.paths}
    if len(found) > 1:
        (one, first), (other, second) = list(found.items())[:2]
        raise CheckpointError(f"expected experts of one dtype, got {first} of {one} and {second} of {other}")
    return next(iter(found), spec.dtype)


def _place(
    arrays: ModuleArrays,
    layout: Layout,
    name: str,
    shape: tuple[int, ...],
    spec: ModelSpec,
    stacked: int | None = None,
) -> Place:
    candidates = layout.candidates(name)
    if not candidates:
        raise ConfigError(
            f"layout {layout.name}: expected a path for {name!r}, which a {spec.family} model has, got none; "
            "give a mapping that has one"
        )
    path = next((each for each in candidates if each.removesuffix(".T") in arrays.paths), candidates[0])
    return Place(path=path.removesuffix(".T"), shape=shape, by_rows=path.endswith(".T"), stacked=stacked)


def _experts(arrays: ModuleArrays, layout: Layout, index: int, spec: ModelSpec) -> dict[str, Place]:
    """The places of the fields of a layer's experts. Gate and up may be one array, `gate_up`: they have its outputs one
    after the other, or by turns where the family's files have it so."""
    prefix = EXPERTS.replace("{index}", str(index))
    interleaved = FAMILIES[spec.family].names.experts.interleaved
    places = {}
    for name, shape in {field.name: field.shape for field in spec.expert_layout.fields}.items():
        matrix, _, bias = name.partition("_")
        half = {"gate": 0, "up": 1}.get(matrix)
        both = f"{prefix}.gate_up" + (f"_{bias}" if bias else "")
        own = layout.candidates(f"{prefix}.{name}")
        if half is None or not layout.candidates(both) or any(path.removesuffix(".T") in arrays.paths for path in own):
            places[name] = _place(arrays, layout, f"{prefix}.{name}", shape, spec, spec.moe.num_experts)
            continue
        place = _place(arrays, layout, both, shape, spec, spec.moe.num_experts)
        start, step = (half, 2) if interleaved else (half * shape[0], 1)
        places[name] = replace(place, start=start, step=step, parts=2)
    return places


def _first(paths: list[str]) -> str:
    unique = list(dict.fromkeys(paths))
    return ", ".join(unique[:3]) + (", ..." if len(unique) > 3 else "")
