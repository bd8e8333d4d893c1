"""A host pool of random experts, for presets and benchmarks: real shapes, finite numbers, at the speed of memory."""

from __future__ import annotations

import math
from functools import partial

import jax
import numpy as np

from pallas_kernels.layout import FP4, ExpertLayout, Field
from seqmoe_jax.experts.host_pool import Pool, Work, build_pool
from seqmoe_jax.host_memory import Progress

FP4_SPREAD = 2.8  # standard deviation of e2m1 values with uniform codes
FP8_SPREAD = 100.0  # of random e4m3 values: the largest, 448, is 4.5 deviations out, as in a real block


def random_host_pool(
    layout: ExpertLayout,
    num_layers: int,
    num_experts: int,
    *,
    seed: int = 0,
    scale: float = 1.0,
    device: jax.Device | None = None,
    progress: Progress | None = None,
) -> Pool:
    """Random weights of deviation `scale / sqrt(fan_in)` at the speed of memory, for presets and benchmarks.

    One random expert is drawn; every other is that one with each field rotated and its signs flipped by a
    draw of its own, so experts differ and stay finite in every format. The same seed gives the same pool.
    """
    rng = np.random.default_rng(seed)
    templates = [_random_field(layout, field, rng, scale) for field in layout.fields]
    turns = rng.random((num_layers, num_experts, len(layout.fields)))
    flips = rng.integers(0, 2, (num_layers, num_experts, len(layout.fields)), dtype=np.uint8)

    def fill(layer: int, expert: int, view: np.ndarray) -> int:
        for index, (field, template) in enumerate(zip(layout.fields, templates, strict=True)):
            start = expert * layout.block_bytes + field.offset
            out = view[start : start + field.nbytes].view(template.dtype)
            turn = int(turns[layer, expert, index] * template.size)
            mask = _sign_mask(field, template.dtype) * flips[layer, expert, index]
            np.bitwise_xor(template[turn:], mask, out=out[: template.size - turn])
            np.bitwise_xor(template[:turn], mask, out=out[template.size - turn :])
        return layout.block_bytes

    def work(layer: int) -> list[Work]:
        return [partial(fill, layer, expert) for expert in range(num_experts)]

    return build_pool(
        layout,
        range(num_layers),
        work,
        num_experts=num_experts,
        device=device if device is not None else jax.devices()[0],
        total=num_layers * num_experts * layout.block_bytes,
        progress=progress,
    )


def _random_field(layout: ExpertLayout, field: Field, rng: np.random.Generator, scale: float) -> np.ndarray:
    """The bytes of one random field as unsigned integers as wide as its elements, `[prod(shape)]`."""
    size = math.prod(field.shape)
    bits = np.dtype(f"u{field.dtype.itemsize}")
    matrix = field.name.removesuffix("_scale").removesuffix("_bias")
    deviation = scale / math.sqrt(layout.width if matrix == "down" else layout.hidden)
    values: np.ndarray
    if field.name.endswith("_scale") and layout.dtype == FP4:
        # Exponents next to the one that gives codes, which are uniform, the deviation.
        return rng.integers(-1, 2, size).astype(np.uint8) + np.uint8(127 + round(math.log2(deviation / FP4_SPREAD)))
    if field.name.endswith("_scale"):
        # FP8 values have a deviation of FP8_SPREAD. Scales of real checkpoints spread at least this widely.
        values = deviation / FP8_SPREAD * rng.uniform(0.8, 1.25, size)
    elif field.dtype.kind in "iub":
        return rng.integers(0, 256, size * field.dtype.itemsize, dtype=np.uint8).view(bits)
    elif layout.scales and not field.name.endswith("_bias"):
        values = np.clip(rng.standard_normal(size, np.float32) * np.float32(FP8_SPREAD), -448, 448)
    else:
        values = rng.standard_normal(size, np.float32) * np.float32(deviation)
    return values.astype(field.dtype).view(bits)


def _sign_mask(field: Field, bits: np.dtype) -> np.generic:
    """The bit that negates an element of `field`; none for scales (they are positive) and packed integers."""
    signed = field.dtype.kind not in "iub" and not field.name.endswith("_scale")
    return bits.type(1 << (8 * bits.itemsize - 1) if signed else 0)
