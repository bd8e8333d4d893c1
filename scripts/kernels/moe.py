"""Check and time the experts' kernels: the MoE layer of a decode step, the same while experts arrive, and of a prefill.

    python -m scripts.kernels.moe --shapes peer --batches 1 4 --minutes 2 [--sweep] [--out moe.json]

Decode: the layer, and with `--sweep` other block shapes. Every call reads other slots of an array larger than the L2
cache. Between two calls stands a conversion of the result to the dtype of the input, a launch that models do not have.
On demand: none, one or two experts are missing and come from pinned host memory, before or while the others compute.
Prefill: tokens in blocks by expert.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.fused_moe import FusedMoEConfig, fused_moe, moe_on_demand
from pallas_kernels.fused_moe.config import default_config
from pallas_kernels.grouped_moe import GroupedMoEConfig, assign_blocks, grouped_moe
from pallas_kernels.grouped_moe.config import default_config as default_grouped_config
from pallas_kernels.layout import FP4, FP8, Activation, ExpertLayout, swiglu_layout
from pallas_kernels.miss_load import miss_load
from scripts.kernels.harness import BF16, Job, compare, draw, jitted, parser, pinned, random_experts, run

OSS: dict[str, Any] = {"activation": Activation(limit=7.0, slope=1.702, shift=1.0), "bias": BF16}
# K, H, F, dtype of the experts, and what GPT-OSS's have besides.
SHAPES: dict[str, tuple[int, int, int, np.dtype, dict[str, Any]]] = {
    "peer": (4, 2048, 1536, BF16, {}),
    "qwen3-30b-fp8": (8, 2048, 768, FP8, {}),
    "qwen3-30b-fp8-channel": (8, 2048, 768, FP8, {"scales": "channel"}),
    "qwen3-30b-partly-fp8": (8, 2048, 768, BF16, {"scales": "block"}),
    "demo": (4, 256, 64, BF16, {}),
    "gpt-oss": (4, 2880, 2880, BF16, OSS),
    "gpt-oss-mxfp4": (4, 2880, 2880, FP4, OSS),
    "tiny": (2, 64, 32, np.dtype(np.float32), {}),
}
TOLERANCE = 4e-3  # relative norm; bf16 rounding of hidden values that fall the other way


@cache
def case(name: str, routes: int, gigabytes: float) -> tuple[ExpertLayout, Array]:
    """The layout and slots of some different experts, at least as many slots as there are routes."""
    _, hidden, width, dtype, extras = SHAPES[name]
    layout = swiglu_layout(hidden=hidden, width=width, dtype=dtype, **extras)
    rows = max(routes, int(gigabytes * 1e9 / layout.block_bytes))
    # One output of the full size, no second copy of it.
    return layout, jax.jit(lambda some: some[jnp.arange(rows) % 4])(jnp.asarray(random_experts(layout, 4, seed=0)))


def decode_jobs(args: argparse.Namespace) -> Iterator[Job]:
    for name, batch in itertools.product(args.shapes, args.batches):
        per_token, hidden, *_ = SHAPES[name]
        routes = batch * per_token
        layout, slots = case(name, args.layers * routes, args.gigabytes)
        rng = np.random.default_rng()
        chosen = rng.permutation(slots.shape[0])[: args.layers * routes].reshape(args.layers, batch, per_token)
        ids = tuple(jnp.asarray(layer, jnp.int32) for layer in chosen)  # an array each: slicing one would be a launch
        weights = jnp.asarray(rng.uniform(0.1, 1, (batch, per_token)), jnp.float32)
        state, default = partial(draw, 0, batch, hidden), default_config(layout, per_token)
        kernel = partial(fused_moe, layout=layout, implementation="gpu", interpret=args.interpret)
        reference = partial(fused_moe, layout=layout, implementation="xla")
        ways: dict[str, Any] = {"xla": reference, "default": kernel}
        if args.sweep:
            ways |= {str(config): partial(kernel, config=config) for config in other_configs(layout, default)}
        for label, call in jitted(ways).items():
            yield Job(
                labels={"moe": name, "batch": batch, "config": label}, program=partial(decode_chain, call), state=state,
                inputs=(slots, ids, weights), calls=args.layers,
                check=partial(compare, call, reference, state, slots, ids[0], weights, tolerance=TOLERANCE),
                nbytes=routes * sum(field.nbytes for field in layout.fields),
                profile="fused_moe" if label == "default" and args.profile else None,
            )  # fmt: skip


def decode_chain(call: Any, x: Array, slots: Array, ids: Any, weights: Array) -> Array:
    for layer in ids:
        x = call(x, slots, layer, weights).astype(x.dtype)
    return x


def other_configs(layout: ExpertLayout, default: FusedMoEConfig) -> Iterator[FusedMoEConfig]:
    """Each projection's block shapes by themselves, beside the default of the other."""
    for part, rows, cols, warps in itertools.product(("up", "down"), (1, 2, 4, 8), (256, 512, 2048), (1, 2, 4, 8)):
        matrices, length = (2, layout.hidden) if part == "up" else (1, layout.width)
        in_flight = rows * matrices * length * layout.dtype.itemsize / (32 * warps)  # bytes a thread
        if cols <= 2 * length and 60 <= in_flight <= 512:
            changes: dict[str, Any] = {f"{part}_rows": rows, f"{part}_cols": cols, f"{part}_warps": warps}
            yield dataclasses.replace(default, **changes)


def on_demand_jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Both ways to load; the second has the bits of the first."""
    for name, batch in itertools.product(args.shapes, args.batches):
        per_token, hidden, *_ = SHAPES[name]
        routes, layers = batch * per_token, args.layers
        layout, slots = case(name, layers * routes, 0)
        blocks = random_experts(layout, 1, seed=1).repeat(8, 0)
        pool = jnp.asarray(blocks) if args.interpret else pinned(blocks)
        weights = jnp.full((batch, per_token), 1 / per_token, jnp.float32)
        ids = tuple(jnp.arange(layers * routes, dtype=jnp.int32).reshape(layers, batch, per_token))
        how = {"layout": layout, "implementation": "gpu", "interpret": args.interpret}
        ways = {"loaded first": partial(load_first, **how), "meanwhile": partial(moe_on_demand, **how)}
        state = partial(x_and_slots, batch, hidden, slots)
        for missing, (label, call) in itertools.product((0, 1, 2), jitted(ways).items()):
            experts, dst = np.full((2, layers, routes), -1, np.int32)
            experts[:, :missing] = np.arange(missing)
            dst[:, :missing] = routes * np.arange(layers)[:, None] + np.arange(missing)
            misses = tuple(zip(map(jnp.asarray, experts), map(jnp.asarray, dst), strict=True))
            first = partial(on_demand_chain, ways["loaded first"])
            yield Job(
                labels={"on demand": name, "batch": batch, "missing": missing, "experts": label},
                program=partial(on_demand_chain, call), state=state, inputs=(ids, weights, pool, misses), calls=layers,
                check=partial(compare, partial(on_demand_chain, call), first, state, ids, weights, pool, misses,
                              tolerance=0.0),
            )  # fmt: skip


def x_and_slots(batch: int, hidden: int, slots: Array) -> tuple[Array, Array]:
    return draw(1, batch, hidden), jnp.copy(slots)


def on_demand_chain(call: Any, state: Any, ids: Any, weights: Array, pool: Array, misses: Any) -> Any:
    x, slots = state
    for layer, (experts, dst) in zip(ids, misses, strict=True):
        slots, y = call(x, slots, layer, weights, pool, experts, dst)
        x = jax.lax.optimization_barrier(y.astype(x.dtype))
    return x, slots


def load_first(
    x: Array, slots: Array, ids: Array, weights: Array, pool: Array, experts: Array, dst: Array, **how: Any
) -> tuple[Array, Array]:
    """All is loaded before anything is computed."""
    loading = {name: value for name, value in how.items() if name != "layout"}
    slots = miss_load(slots, pool, experts, dst, **loading)
    return slots, fused_moe(x, slots, ids, weights, **how)


def prefill_jobs(args: argparse.Namespace) -> Iterator[Job]:
    for name, (tokens, rows) in itertools.product(args.shapes, ((128, 16), (2048, 64))):
        per_token, hidden, width, *_ = SHAPES[name]
        if name == "tiny":
            tokens //= 16
        experts = 8 if name == "tiny" else 64
        layout, slots = case(name, experts, 0)
        rng = np.random.default_rng()
        ids = jnp.asarray(np.stack([rng.permutation(experts)[:per_token] for _ in range(tokens)]), jnp.int32)
        block_slots, block_rows, _ = assign_blocks(ids, num_experts=experts, rows=rows)
        inputs = draw(2, tokens, hidden), slots, block_slots, block_rows
        state = partial(jnp.zeros, (*block_rows.shape, hidden), jnp.float32)
        kernel = partial(grouped_moe, layout=layout, implementation="gpu", interpret=args.interpret)
        reference = partial(grouped_moe, layout=layout, implementation="xla")
        ways: dict[str, Any] = {"default": kernel}
        if args.sweep:
            ways |= {str(config): partial(kernel, config=config) for config in other_grouped_configs(layout)}
        for label, call in jitted(ways).items():
            yield Job(
                labels={"prefill": name, "tokens": tokens, "rows": rows, "config": label},
                program=partial(prefill_chain, call, args.layers), state=state, inputs=inputs, calls=args.layers,
                check=partial(compare, call, reference, state, *inputs, tolerance=TOLERANCE),
                flops=2 * 3 * tokens * per_token * hidden * width,
            )  # fmt: skip


def prefill_chain(call: Any, layers: int, out: Array, *inputs: Array) -> Array:
    for _ in range(layers):
        out = call(out, *inputs)
    return out


def other_grouped_configs(layout: ExpertLayout) -> Iterator[GroupedMoEConfig]:
    default = default_grouped_config(layout)
    for cols, depth, warps in itertools.product((32, 64, 128), (32, 64, 128), (4, 8)):
        yield dataclasses.replace(default, up_cols=cols, down_cols=cols, depth=depth, warps=warps)


PARTS = {"decode": decode_jobs, "on-demand": on_demand_jobs, "prefill": prefill_jobs}


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__, PARTS, SHAPES)
    options.add_argument("--gigabytes", type=float, default=2.1, help="size of the slot array")
    options.add_argument("--profile", action="store_true", help="also the kernels' durations by the profiler")
    options.set_defaults(layers=12)
    return run(options, PARTS, argv)


if __name__ == "__main__":
    sys.exit(main())
