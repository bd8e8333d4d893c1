"""Check on a GPU that experts computed while others arrive give the bits of loading first, and time both ways.

    python -m scripts.bench_overlap --out overlap.json [--sweep] [--minutes 1]

The timed programs chain the MoE layers of a step (by default with the experts of the peer comparison, K=4, H=2048,
F=1536, bf16), each with slots of its own, of which none, one or two wait for their experts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.backend import resolve
from pallas_kernels.fused_moe import fused_moe
from pallas_kernels.fused_moe.on_demand import Sharing, moe_on_demand
from pallas_kernels.layout import FP4, FP8, ExpertLayout, swiglu_layout
from pallas_kernels.miss_load import miss_load
from scripts.bench_cache_kernels import Job, pinned, print_table, run_jobs

BF16 = np.dtype(jnp.bfloat16)
CHECKED = {  # H, F, dtype, dtype of the biases; ragged where a format allows it
    "bf16": (1024, 768, BF16, None),
    "bf16, biased": (1088, 560, BF16, BF16),
    "f16": (1024, 512, np.dtype(np.float16), None),
    "f32": (512, 320, np.dtype(np.float32), None),
    "fp8": (1024, 768, FP8, None),
    "fp8, ragged": (1000, 424, FP8, None),
    "mxfp4, biased": (2880, 1440, FP4, BF16),
}
MISSING = (0, 1, 2)


def random_experts(layout: ExpertLayout, count: int, seed: int) -> np.ndarray:
    """Blocks of random numbers of a size that keeps sums near one."""
    rng = np.random.default_rng(seed)

    def tensor(field: Any) -> np.ndarray:
        if field.dtype == np.uint8:  # FP4: exponents, or any two codes
            low, high = (118, 124) if field.name.endswith("_scale") else (0, 256)
            return rng.integers(low, high, field.shape, np.uint8)
        scale = 0.02 if layout.dtype == FP8 and field.name.endswith("_scale") else 1.0 if field.dtype == FP8 else 0.05
        return (scale * rng.standard_normal(field.shape, np.float32)).astype(field.dtype)

    return np.stack([layout.pack({field.name: tensor(field) for field in layout.fields}) for _ in range(count)])


def separate(
    x: Array, slots: Array, ids: Array, weights: Array, pool: Array, experts: Array, dst: Array, layout: ExpertLayout
) -> tuple[Array, Array]:
    """All is loaded before anything is computed."""
    slots = miss_load(slots, pool, experts, dst, implementation="gpu")
    return slots, fused_moe(x, slots, ids, weights, layout=layout, implementation="gpu")


def check(case: tuple[str, int]) -> int:
    """Routes of one format and batch, with experts missing or not; returns how many were compared."""
    name, batch = case
    hidden, width, dtype, bias = CHECKED[name]
    layout = swiglu_layout(hidden=hidden, width=width, dtype=dtype, bias=bias)
    rng, per_token = np.random.default_rng(batch), 4
    blocks, pool = random_experts(layout, 12, 1), pinned(random_experts(layout, 8, 2))
    x = jnp.asarray(rng.standard_normal((batch, hidden)), BF16)
    weights = jnp.asarray(rng.uniform(0.1, 1, (batch, per_token)), jnp.float32)
    both = [jax.jit(partial(call, layout=layout), donate_argnums=1) for call in (moe_on_demand, separate)]
    for missing in range(per_token + 1):
        ids = np.stack([rng.permutation(12)[:per_token] for _ in range(batch)]).astype(np.int32)
        ids[0, 3] = -1 if missing == 1 else ids[0, 3]
        routed = [slot for slot in dict.fromkeys(ids.ravel().tolist()) if slot >= 0]
        experts, dst = np.full((2, ids.size), -1, np.int32)
        dst[: min(missing, len(routed))] = rng.permutation(routed)[:missing]
        experts[:missing] = rng.permutation(8)[:missing]
        results = []
        for call in both:
            slots = jnp.copy(jax.device_put(blocks))
            address = slots.unsafe_buffer_pointer()
            slots, out = call(x, slots, jnp.asarray(ids), weights, pool, jnp.asarray(experts), jnp.asarray(dst))
            if slots.unsafe_buffer_pointer() != address:
                raise AssertionError(f"{name}: the slots moved")
            results.append((np.asarray(slots), np.asarray(out)))
        for ours, theirs in zip(*results, strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=f"{name}, batch {batch}, {missing} missing")
        if not np.isfinite(results[0][1]).all():
            raise AssertionError(f"{name}: numbers too large to compare")
    return per_token + 1


def jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Both ways, and with `--sweep` other ways to share the work."""
    layout = swiglu_layout(hidden=args.hidden, width=args.width, dtype=BF16)
    blocks = random_experts(layout, 1, 0)
    pool, block = pinned(blocks.repeat(8, 0)), jnp.asarray(blocks[0])
    per_token, layers = args.active, args.layers
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((args.batch, args.hidden)), BF16)
    weights = jnp.full((args.batch, per_token), 1 / per_token, jnp.float32)
    routes = args.batch * per_token
    ids = jnp.arange(layers * routes, dtype=jnp.int32).reshape(layers, args.batch, per_token)
    calls: dict[str, Any] = {"loaded first": separate, "meanwhile": moe_on_demand}
    if args.sweep:
        grid = itertools.product((32, 64, 128), (2048, 4096, 8192), (256,))
        for warps, size, late in [*grid, (64, 4096, 128), (64, 4096, 512)]:
            sharing = Sharing(loading_warps=warps, bytes_per_warp=size, late_programs=late)
            calls[str(sharing)] = partial(moe_on_demand, sharing=sharing)
    for missing in MISSING:
        misses = []
        for layer in range(layers):
            experts, dst = np.full((2, routes), -1, np.int32)
            experts[:missing], dst[:missing] = range(missing), layer * routes + np.arange(missing)
            misses.append((jnp.asarray(experts), jnp.asarray(dst)))
        for name, call in calls.items():

            def program(
                state: tuple[Array, Array], ids: Any, weights: Array, pool: Array, misses: Any, call: Any = call
            ) -> tuple[Array, Array]:
                x, slots = state
                for layer, (experts, dst) in zip(ids, misses, strict=True):
                    slots, y = call(x, slots, layer, weights, pool, experts, dst, layout=layout)
                    x = jax.lax.optimization_barrier(y.astype(x.dtype))
                return x, slots

            def state() -> tuple[Array, Array]:
                return jnp.copy(x), jnp.repeat(block[None], layers * routes, axis=0)

            inputs = tuple(ids), weights, pool, misses
            labels = {"missing": missing, "experts": name}
            yield Job(labels=labels, program=program, state=state, inputs=inputs, calls=layers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--active", type=int, default=4, help="experts per token")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12, help="layers chained in one jit")
    parser.add_argument("--minutes", type=float, default=1, help="stop after about this time and write what there is")
    parser.add_argument("--sweep", action="store_true", help="also other ways to share the work")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="compare bits first")
    args = parser.parse_args()
    if resolve(None) != "gpu":
        print(f"bench_overlap: needs a GPU, JAX found {jax.default_backend()}", file=sys.stderr)
        return 2
    deadline = time.monotonic() + 60 * args.minutes
    report: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "settings": vars(args)}
    if args.check:
        with ThreadPoolExecutor(8) as pool:
            compared = sum(pool.map(check, itertools.product(CHECKED, (1, 3))))
        report["layers of equal bits"] = compared
    print(*report.items(), sep="\n", flush=True)
    report["times"] = run_jobs(list(jobs(args)), deadline)
    print_table(report["times"])
    if args.out:
        with open(args.out, "w") as file:
            json.dump(report, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
