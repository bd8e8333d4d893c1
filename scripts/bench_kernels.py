"""Sweeps block shapes of the decode MoE kernels on this machine's GPU; prints microseconds and TB/s.

python scripts/bench_kernels.py [--out FILE.json] [--shapes NAME ...] [--batches N ...] [--prefill]

Every configuration is first checked against the reference with fresh random inputs. Timed are many calls
chained in one jitted computation over different slots of an array far larger than the L2 cache, so that
weights come from memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.fused_moe import Config, fused_moe
from pallas_kernels.fused_moe.config import Fp8Mode, default_config
from pallas_kernels.grouped_moe import Config as GroupedConfig
from pallas_kernels.grouped_moe import assign_blocks, grouped_moe
from pallas_kernels.grouped_moe.config import default_config as default_grouped_config
from pallas_kernels.layout import FP8, ExpertLayout, swiglu_layout

BF16 = np.dtype(ml_dtypes.bfloat16)
# K, H, F, dtype of the experts.
SHAPES: dict[str, tuple[int, int, int, np.dtype]] = {
    "peer": (4, 2048, 1536, BF16),
    "qwen3-30b-fp8": (8, 2048, 768, FP8),
    "demo": (4, 256, 64, BF16),
    "gpt-oss": (4, 2880, 2880, BF16),
}
CALLS = 24  # chained in one computation, as the layers of a model are
TOLERANCE = 4e-3  # relative norm; bf16 rounding of hidden values that fall the other way


def random_slots(layout: ExpertLayout, count: int, seed: int) -> jax.Array:
    """`storage[S, n]` made on the device: a few different experts, repeated over the slots."""
    rng = np.random.default_rng(seed)

    def tensor(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if dtype == np.float32 and layout.storage == np.uint8:
            return rng.uniform(0.005, 0.015, shape).astype(np.float32)
        spread = 3.0 if dtype == FP8 else 0.03
        return (rng.standard_normal(shape, np.float32) * spread).astype(dtype)

    experts = [layout.pack({f.name: tensor(f.shape, f.dtype) for f in layout.fields}) for _ in range(min(count, 8))]
    some = jnp.asarray(np.stack(experts))
    # One output of the full size, no second copy of it.
    return jax.jit(lambda some: some[jnp.arange(count) % some.shape[0]])(some)


def slot_count(layout: ExpertLayout, gigabytes: float) -> int:
    """Slots to fill the given size; one-byte storage skips sizes that the kernels refuse."""
    count = int(gigabytes * 1e9 // layout.block_bytes) + 1
    if layout.storage.itemsize == 1 and 2**31 < count * layout.block_bytes <= 2**32:
        count = 2**32 // layout.block_bytes + 1
    return count


def median_us(f: Callable[..., Any], *args: Any, repeats: int) -> float:
    """Median microseconds of a call that has been compiled and run before."""
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def relative_error(got: jax.Array, want: jax.Array) -> float:
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def decode_configs(layout: ExpertLayout) -> Iterator[Config]:
    """The default first, then its neighbours: each of the two kernels varied by itself."""
    base = default_config(layout)
    seen = set()
    fp8_modes: tuple[Fp8Mode, ...] = ("convert", "bits") if layout.storage == np.uint8 else (base.fp8,)
    up = itertools.product((1, 2, 4, 8), (256, 1024, 2048), (1, 2, 4))
    down = itertools.product((2, 4, 8, 16), (64, 256, 512, 1024), (1, 2, 4))
    candidates = [base, *(dataclasses.replace(base, fp8=mode) for mode in fp8_modes)]
    candidates += [dataclasses.replace(base, up_rows=r, up_cols=c, up_warps=w) for r, c, w in up]
    candidates += [dataclasses.replace(base, down_rows=r, down_cols=c, down_warps=w) for r, c, w in down]
    for config in candidates:
        width, hidden = layout.field("gate").shape
        # Not what is mostly masked, nor tiles that spill: up holds two of them.
        too_wide = config.up_cols >= 2 * max(hidden, 128) or config.down_cols >= 2 * max(width, 128)
        up_bytes = 2 * config.up_rows * config.up_cols * layout.field("gate").dtype.itemsize / config.up_warps
        if config in seen or (config != base and (too_wide or not 1024 <= up_bytes <= 32 * 1024)):
            continue
        try:
            config.check(layout)
        except ValueError:  # does not fit the scale blocks of FP8
            continue
        seen.add(config)
        yield config


def bench_decode(name: str, batch: int, *, gigabytes: float, repeats: int, sweep: bool) -> Iterator[dict[str, Any]]:
    """One result per configuration."""
    per_token, hidden, width, dtype = SHAPES[name]
    layout = swiglu_layout(hidden=hidden, width=width, dtype=dtype)
    slots = random_slots(layout, slot_count(layout, gigabytes), seed=batch)
    rng = np.random.default_rng(time.time_ns())
    routes = CALLS * batch * per_token
    chosen = rng.choice(slots.shape[0], routes, replace=routes > slots.shape[0])
    ids = jnp.asarray(chosen.reshape(CALLS, batch, per_token), jnp.int32)
    weights = jnp.asarray(rng.uniform(0.1, 1, ids.shape[1:]), jnp.float32)
    x = jnp.asarray(rng.standard_normal((batch, hidden)), jnp.bfloat16)
    moved = batch * per_token * 3 * hidden * width * dtype.itemsize  # what a call reads of the weights

    def chain(x: jax.Array, slots: jax.Array, ids: jax.Array, weights: jax.Array, *, call: Any) -> jax.Array:
        for i in range(CALLS):
            y = call(x, slots, ids[i], weights)
            x = (x.astype(jnp.float32) + y / (1e-6 + jnp.max(jnp.abs(y)))).astype(x.dtype)
        return x

    def measure(call: Any) -> float:
        return median_us(jax.jit(partial(chain, call=call)), x, slots, ids, weights, repeats=repeats) / CALLS

    reference = partial(fused_moe, layout=layout, implementation="xla")
    want = jax.jit(reference)(x, slots, ids[0], weights)
    row = {"kernel": "fused_moe", "shape": name, "batch": batch, "slots": slots.shape[0]}
    us = measure(reference)
    yield row | {"config": "xla", "us": us, "tb_per_s": moved / us / 1e6}
    for index, config in enumerate(decode_configs(layout)):
        if index and not sweep:
            return
        label = {"config": dataclasses.asdict(config), "default": index == 0}
        call = partial(fused_moe, layout=layout, implementation="gpu", config=config)
        try:
            error = relative_error(jax.jit(call)(x, slots, ids[0], weights), want)
            if not error < TOLERANCE:
                yield row | label | {"failed": f"relative error {error:.1e}"}
                continue
            us = measure(call)
        except Exception as problem:  # a shape that does not compile is a result of the sweep
            yield row | label | {"failed": f"{type(problem).__name__}: {str(problem)[:200]}"}
            continue
        yield row | label | {"us": us, "tb_per_s": moved / us / 1e6, "error": error}


def grouped_configs(layout: ExpertLayout) -> Iterator[GroupedConfig]:
    base = default_grouped_config(layout)
    yield base
    depths = (128,) if layout.storage == np.uint8 else (32, 64, 128)
    for cols in (32, 64, 128):
        for depth in depths:
            for warps in (4, 8):
                config = dataclasses.replace(base, up_cols=cols, down_cols=cols, depth=depth, warps=warps)
                if config != base:
                    yield config


def bench_prefill(
    name: str, *, tokens: int, rows: int, experts: int, repeats: int, sweep: bool
) -> Iterator[dict[str, Any]]:
    per_token, hidden, width, dtype = SHAPES[name]
    layout = swiglu_layout(hidden=hidden, width=width, dtype=dtype)
    slots = random_slots(layout, experts, seed=tokens)
    rng = np.random.default_rng(time.time_ns())
    ids = jnp.asarray(np.stack([rng.permutation(experts)[:per_token] for _ in range(tokens)]), jnp.int32)
    block_slots, block_rows, _ = assign_blocks(ids, num_experts=experts, rows=rows)
    x = jnp.asarray(rng.standard_normal((tokens, hidden)), jnp.bfloat16)
    fresh = jax.jit(lambda: jnp.zeros((*block_rows.shape, hidden), jnp.float32))
    used = block_slots[:, None, None] >= 0
    want = grouped_moe(fresh(), x, slots, block_slots, block_rows, layout=layout, implementation="xla")
    row = {"kernel": "grouped_moe", "shape": name, "tokens": tokens, "rows": rows, "blocks": int(used.sum())}
    for index, config in enumerate(grouped_configs(layout)):
        if index and not sweep:
            return
        label = {"config": dataclasses.asdict(config), "default": index == 0}
        call = jax.jit(partial(grouped_moe, layout=layout, implementation="gpu", config=config), donate_argnums=0)
        try:
            out = call(fresh(), x, slots, block_slots, block_rows)
            error = relative_error(jnp.where(used, out, 0), jnp.where(used, want, 0))
            if not error < TOLERANCE:
                yield row | label | {"failed": f"relative error {error:.1e}"}
                continue
            times = []
            for skipped in (block_slots, jnp.full_like(block_slots, -1)):
                samples = []
                for _ in range(repeats):
                    start = time.perf_counter()
                    out = jax.block_until_ready(call(out, x, slots, skipped, block_rows))
                    samples.append(time.perf_counter() - start)
                times.append(statistics.median(samples) * 1e6)
        except Exception as problem:
            yield row | label | {"failed": f"{type(problem).__name__}: {str(problem)[:200]}"}
            continue
        flops = 2 * 3 * tokens * per_token * hidden * width
        yield (
            row
            | label
            | {
                "us": times[0],
                "us_all_skipped": times[1],
                "tflop_per_s": flops / times[0] / 1e6,
                "error": error,
            }
        )


def describe(result: dict[str, Any]) -> str:
    """One line of the table."""
    config = result["config"]
    if isinstance(config, dict):
        config = " ".join(f"{key}={value}" for key, value in config.items())
    where = f"{result['kernel']:11} {result['shape']:13} " + " ".join(
        f"{key}={result[key]}" for key in ("batch", "tokens", "rows") if key in result
    )
    if "failed" in result:
        return f"{where:40} FAILED {result['failed'][:60]}  {config}"
    rate = f"{result['tb_per_s']:6.2f} TB/s" if "tb_per_s" in result else f"{result['tflop_per_s']:6.1f} TFLOP/s"
    default = " *default*" if result.get("default") else ""
    return f"{where:40} {result['us']:8.1f} us {rate}  {config}{default}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write all results as JSON")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=["peer", "qwen3-30b-fp8", "demo"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--gigabytes", type=float, default=2.1, help="size of the slot array")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-sweep", action="store_true", help="the default configuration only")
    parser.add_argument("--prefill", action="store_true", help="also the prefill kernel")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"bench_kernels: needs a GPU, JAX found {jax.default_backend()}", file=sys.stderr)
        return 2
    runs = [
        bench_decode(
            name,
            batch,
            gigabytes=args.gigabytes,
            repeats=args.repeats,
            sweep=not args.no_sweep and batch == 1,
        )
        for name in args.shapes
        for batch in args.batches
    ]
    if args.prefill:
        runs += [
            bench_prefill(name, tokens=tokens, rows=rows, experts=64, repeats=args.repeats, sweep=not args.no_sweep)
            for name in args.shapes
            for tokens, rows in ((128, 16), (2048, 64))
        ]
    results: list[dict[str, Any]] = []
    for run in runs:
        part = []
        for result in run:
            part.append(result)
            if "failed" in result or not isinstance(result["config"], dict) or result["default"]:
                print(describe(result), flush=True)
        for result in sorted((r for r in part if "us" in r), key=lambda r: r["us"])[:5]:
            print("  best:", describe(result), flush=True)
        results += part
        if args.out:  # after every shape: an interrupted sweep keeps what it has
            device = jax.devices()[0].device_kind
            args.out.write_text(json.dumps({"device": device, "jax": jax.__version__, "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
