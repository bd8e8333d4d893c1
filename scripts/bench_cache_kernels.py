"""Check `slot_update` and `miss_load` against their references on a GPU, and time them as a decode step uses them.

python scripts/bench_cache_kernels.py --out cache_kernels.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.backend import Implementation, resolve
from pallas_kernels.miss_load import miss_load
from pallas_kernels.slot_update import SlotState, SlotTables, slot_update

SIZES = {"qwen3-30b-a3b at 45 %": (48, 128, 2765, 8), "gpt-oss-20b at 45 %": (24, 32, 345, 4)}  # L, E, S, K


def random_tables(rng: np.random.Generator, keys: int, slots: int, engine: bool) -> tuple[SlotTables, Array]:
    """Consistent tables with all kinds of slots, and tags of which half have come back."""
    state = rng.choice(4, slots, p=[0.02, 0.78, 0.1, 0.1] if engine else [0.02, 0.98, 0, 0]).astype(np.int32)
    key_of_slot = np.where(state == SlotState.EMPTY, -1, rng.permutation(keys)[:slots]).astype(np.int32)
    resident = (state == SlotState.USED) | (state == SlotState.COMPUTE)
    slot_of_key = np.full(keys, -1, np.int32)
    slot_of_key[key_of_slot[resident]] = np.flatnonzero(resident)
    tag = np.where(state == SlotState.FETCH, rng.integers(1, 999, slots), 0).astype(np.int32)
    score = np.where(resident, rng.integers(0, 9, slots), 0).astype(np.int32)
    landed = np.where(rng.random(slots) < 0.5, tag, 0).astype(np.int32)
    return SlotTables(*map(jnp.asarray, (slot_of_key, key_of_slot, state, tag, score))), jnp.asarray(landed)


def check_slot_update(implementation: Implementation, trials: int) -> int:
    """Random states through both implementations; returns how many were compared, raises at the first difference."""
    compared = 0
    for layers, experts, slots, active in SIZES.values():
        for rule in ("lru", "lfu", "scored"):
            for engine in (False, True):
                for ids_per_call in (active, 64):
                    rng = np.random.default_rng(0)
                    key_score = jnp.asarray(rng.integers(0, 9, layers * experts), jnp.int32)
                    call = partial(slot_update, num_experts=experts, rule=rule)
                    ours, expected = (jax.jit(partial(call, implementation=name)) for name in (implementation, "xla"))
                    for trial in range(trials):
                        tables, landed = random_tables(rng, layers * experts, slots, engine)
                        ids = jnp.asarray(rng.integers(-1, experts, ids_per_call), jnp.int32)
                        extra: dict[str, Any] = {
                            "first_key": jnp.int32(trial % layers * experts),
                            "clock": jnp.int32(50),
                            "key_score": key_score,
                            "landed": landed if engine else None,
                        }
                        both = (jax.tree.leaves(f(tables, ids, **extra)) for f in (ours, expected))
                        for a, b in zip(*both, strict=True):
                            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
                        compared += 1
    return compared


def pinned(x: np.ndarray) -> Array:
    return jax.device_put(x, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))


def check_miss_load(implementation: Implementation) -> int:
    """Copies of odd and even sizes in all storage dtypes, from pinned memory; the pool is not copied."""
    rng, compared = np.random.default_rng(1), 0
    for dtype in (jnp.bfloat16, jnp.float32, jnp.float16, jnp.uint8):
        for length in (1 << 18, 300_032):
            slots = rng.integers(0, 200, (24, length)).astype(jnp.dtype(dtype))
            pool = rng.integers(0, 200, (16, length)).astype(jnp.dtype(dtype))
            experts = np.array([3, 15, 0, 7, -1, -1], np.int32)
            dst = np.array([23, 0, 11, 5, -1, -1], np.int32)
            load = jax.jit(partial(miss_load, implementation=implementation), donate_argnums=0)
            on_device = jnp.copy(jax.device_put(slots))  # a buffer of its own, to be donated
            address = on_device.unsafe_buffer_pointer()
            actual = load(on_device, pinned(pool), experts, dst)
            if actual.unsafe_buffer_pointer() != address:
                raise AssertionError("miss_load moved the slots")
            slots[dst[:4]] = pool[experts[:4]]
            np.testing.assert_array_equal(np.asarray(actual), slots)
            compared += 1
    return compared


def median_us(step: Callable[..., Any], state: Any, *args: Any, calls: int, rounds: int = 15) -> float:
    """Median time per call, us, of a jitted `step` that chains `calls` of them on a donated state."""
    state = jax.block_until_ready(step(state, *args))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(5):
            state = step(state, *args)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - start) / 5 / calls * 1e6)
    return statistics.median(times)


def time_layers(implementation: Implementation, block_bytes: int, layers: int) -> list[dict[str, Any]]:
    """us per layer of slot_update alone and with miss_load, at 0, 1 and 4 misses per layer."""
    rows = []
    for name, (all_layers, experts, slots, active) in SIZES.items():
        pool = pinned(np.ones((experts, block_bytes // 2), jnp.bfloat16))
        cache_rows = min(slots, 256)  # slots beyond these are never given away here, which saves device memory
        for engine in (False, True):
            for misses in (0, 1, min(4, active)):
                tables, ids = steady_tables(all_layers * experts, slots, cache_rows, layers, experts, active, misses)
                landed = pinned(np.zeros(slots, np.int32)) if engine else None

                def step(state: Any, pool: Array, ids: Array, landed: Any, load: bool, experts: int = experts) -> Any:
                    tables, cache, clock, total = state
                    ids = jnp.where(clock % 2 == 0, ids[0], ids[1])
                    for layer in range(layers):
                        tables, _, miss, dst, counts = slot_update(
                            tables,
                            ids[layer],
                            first_key=layer * experts,
                            num_experts=experts,
                            rule="lru",
                            clock=clock,
                            landed=landed,
                            implementation=implementation,
                        )
                        if load:
                            cache = miss_load(cache, pool, miss, dst, implementation=implementation)
                        total = total + counts
                    return tables, cache, clock + 1, total

                row: dict[str, Any] = {"size": name, "engine": engine}
                for load in (False, True):
                    cache = jnp.zeros((cache_rows, block_bytes // 2), jnp.bfloat16)
                    state = (jax.tree.map(jnp.copy, tables), cache, jnp.int32(2), jnp.zeros(3, jnp.int32))
                    run = jax.jit(partial(step, load=load), donate_argnums=0)
                    state = run(state, pool, ids, landed)
                    counted = np.asarray(state[3])
                    state = run(state, pool, ids, landed)
                    row["misses per layer"] = float((np.asarray(state[3]) - counted)[2] / layers)
                    us = median_us(run, state, pool, ids, landed, calls=layers)
                    row["slot_update + miss_load us" if load else "slot_update us"] = round(us, 2)
                extra = row["slot_update + miss_load us"] - row["slot_update us"]
                moved = row["misses per layer"] * block_bytes
                row["miss_load GB/s"] = round(moved / extra / 1e3, 1) if moved else None
                rows.append(row)
    return rows


def steady_tables(
    keys: int, slots: int, cache_rows: int, layers: int, experts: int, active: int, misses: int
) -> tuple[SlotTables, Array]:
    """Tables and two alternating routings `ids[2, layers, active]` with `misses` misses per layer, each step.

    `active - misses` experts of each layer stay resident. The others alternate between two groups; there is room for
    one group, and LRU gives each layer's to the next step's.
    """
    stay = active - misses
    fixed = [layer * experts + e for layer in range(layers) for e in range(stay)]
    groups = [[layer * experts + stay + e for layer in range(layers) for e in range(misses)]]
    # On equal clocks the lower slot goes first, so the group lies below what stays.
    resident = groups[0] + fixed
    if len(resident) > cache_rows:
        raise ValueError(f"{len(resident)} experts in use do not fit {cache_rows} rows")
    others = list(range(layers * experts, keys))[: slots - len(resident)]
    # What no layer touches must not be evicted: it has the highest score.
    key_of_slot = np.array(resident + others, np.int32)
    state = np.full(len(key_of_slot), SlotState.USED, np.int32)
    score = np.where(np.arange(len(key_of_slot)) < len(resident), 0, 1 << 30).astype(np.int32)
    pad = slots - len(key_of_slot)  # slots that are under way for good
    key_of_slot = np.concatenate([key_of_slot, np.full(pad, keys - 1, np.int32)])
    state = np.concatenate([state, np.full(pad, SlotState.FETCH, np.int32)])
    tag = np.where(state == SlotState.FETCH, 1, 0).astype(np.int32)
    score = np.concatenate([score, np.zeros(pad, np.int32)])
    slot_of_key = np.full(keys, -1, np.int32)
    used = np.flatnonzero(state == SlotState.USED)
    slot_of_key[key_of_slot[used]] = used
    ids = [
        [[*range(stay), *range(stay + group * misses, stay + (group + 1) * misses)] for _ in range(layers)]
        for group in (1, 0)
    ]
    tables = SlotTables(*map(jnp.asarray, (slot_of_key, key_of_slot, state, tag, score)))
    return tables, jnp.asarray(ids, jnp.int32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--trials", type=int, default=10, help="random states per configuration")
    parser.add_argument("--block-bytes", type=int, default=4 << 20, help="bytes of one expert")
    parser.add_argument("--layers", type=int, default=24, help="layers chained in one jit")
    parser.add_argument("--implementation", choices=("xla", "gpu"), default=None)
    args = parser.parse_args()
    implementation = resolve(args.implementation)
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "implementation": implementation,
        "slot_update states compared": check_slot_update(implementation, args.trials),
        "miss_load copies compared": check_miss_load(implementation),
        "rows": time_layers(implementation, args.block_bytes, args.layers),
    }
    for key, value in report.items():
        if key != "rows":
            print(f"{key}: {value}")
    columns = list(report["rows"][0])
    print(" | ".join(columns))
    for row in report["rows"]:
        print(" | ".join(str(row[column]) for column in columns))
    if args.out:
        with open(args.out, "w") as file:
            json.dump(report, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
