"""Every GPU kernel over slots and a pool between 2 and 4 GiB: the bytes and bits that it gives over small arrays.

python -m scripts.checks.large_arrays [--gib 3.4] [--layouts float8_e4m3fn]

The pool is in host memory, all its experts go into slots in another order, and are compared byte by byte. Then a few
of them, the first and the last slots among them, are computed with: where they lie, and gathered into an array of a few
slots, by the same kernel (equal bits) and by the reference.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fused_moe import fused_moe, moe_on_demand
from pallas_kernels.grouped_moe import grouped_moe
from pallas_kernels.layout import FP4, FP8, ExpertLayout, swiglu_layout
from pallas_kernels.miss_load import miss_load
from seqmoe_jax.experts.random_pool import random_host_pool
from seqmoe_jax.host_memory import host_view

LAYOUTS = {
    dtype.name: swiglu_layout(hidden=4096, width=2048, dtype=dtype) for dtype in (FP4, FP8, np.dtype(jnp.bfloat16))
}
PER_TOKEN, ROWS = 6, 16


def difference(actual: Any, expected: Any) -> float:
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def check(layout: ExpertLayout, rows: int, tokens: int, implementation: Any) -> dict[str, Any]:
    """What each kernel was found to do; True stands for equal bits or bytes, a number for a relative difference."""
    rng = np.random.default_rng(0)
    (pool,) = random_host_pool(layout, 1, rows)
    gpu = {"implementation": implementation, "interpret": implementation != "xla" and jax.default_backend() == "cpu"}
    load = jax.jit(partial(miss_load, **gpu), donate_argnums=0)
    slot_of = rng.permutation(rows)
    ids = partial(jnp.asarray, dtype=jnp.int32)
    slots = load(jnp.zeros(pool.shape, pool.dtype), pool, ids(np.arange(rows)), ids(slot_of))
    held, stored = np.asarray(slots), host_view(pool)
    found: dict[str, Any] = {
        "bytes": pool.nbytes,
        "miss_load": all(np.array_equal(held[slot_of[expert]], stored[expert]) for expert in range(rows)),
    }
    del held

    chosen = np.concatenate([[0, rows - 1, rows - 2], rng.permutation(np.arange(1, rows - 2))])[: tokens * PER_TOKEN]
    few = jnp.stack([slots[int(slot)] for slot in chosen])
    here, there = (ids(values.reshape(tokens, PER_TOKEN)) for values in (np.arange(len(chosen)), chosen))
    x = jnp.asarray(rng.standard_normal((tokens, layout.hidden)), jnp.bfloat16)
    weights = jnp.asarray(rng.uniform(0.1, 1, (tokens, PER_TOKEN)), jnp.float32)
    fused = jax.jit(partial(fused_moe, layout=layout, **gpu))
    reference = fused_moe(x, few, here, weights, layout=layout, implementation="xla")
    y = fused(x, slots, there, weights)
    found["fused_moe"] = np.array_equal(y, fused(x, few, here, weights)), difference(y, reference)

    blocks = np.minimum(np.arange(2 * len(chosen)) // 2, len(chosen) - 1)
    many = jnp.asarray(rng.standard_normal((64, layout.hidden)), jnp.bfloat16)
    members = ids(rng.integers(0, 64, (len(blocks), ROWS)))
    grouped = jax.jit(partial(grouped_moe, layout=layout, **gpu))
    out = jnp.zeros((len(blocks), ROWS, layout.hidden), jnp.float32)
    y = grouped(out, many, slots, ids(chosen[blocks]), members)
    reference = grouped_moe(out, many, few, ids(blocks), members, layout=layout, implementation="xla")
    found["grouped_moe"] = np.array_equal(y, grouped(out, many, few, ids(blocks), members)), difference(y, reference)

    # Half of the experts leave their slots and are loaded while the others compute.
    lost = chosen[: tokens * PER_TOKEN : 2]
    expert_in = np.argsort(slot_of)
    slots = jax.jit(lambda s: s.at[ids(lost)].set(0), donate_argnums=0)(slots)
    demand = jax.jit(partial(moe_on_demand, layout=layout, **gpu), donate_argnums=1)
    slots, y = demand(x, slots, there, weights, pool, ids(expert_in[lost]), ids(lost))
    found["moe_on_demand"] = (
        np.array_equal(y, fused(x, few, here, weights)),
        all(np.array_equal(np.asarray(slots[int(slot)]), stored[expert_in[slot]]) for slot in lost),
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, default=3.4, help="of the pool, and of the slots")
    parser.add_argument("--tokens", type=int, default=2)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--implementation", default="gpu")
    args = parser.parse_args()
    wrong = False
    for name in args.layouts:
        layout = LAYOUTS[name]
        rows = max(int(args.gib * 2**30 / layout.block_bytes), 3 + args.tokens * PER_TOKEN)
        found = check(layout, rows, args.tokens, args.implementation)
        print(name, found, flush=True)
        results = [part for value in found.values() for part in (value if isinstance(value, tuple) else (value,))]
        wrong |= any(part is False or (isinstance(part, float) and part > 1e-2) for part in results)
    raise SystemExit("something differs" if wrong else 0)


if __name__ == "__main__":
    main()
