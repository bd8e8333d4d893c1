"""Check `slot_update` and `miss_load` against their references on a GPU, and time them as a decode step uses them.

    python scripts/bench_cache_kernels.py --minutes 1.5 --out cache_kernels.json [--sweep]

Programs are compiled in threads and timed one by one. Each chains the layers of one step; steps follow each other
without a wait, on a donated state.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_kernels.backend import Implementation, resolve
from pallas_kernels.miss_load import miss_load
from pallas_kernels.miss_load.gpu import Config, miss_load_gpu
from pallas_kernels.slot_update import Rule, SlotState, SlotTables, slot_update
from seqmoe_jax.experts.slots import open_slots

SIZES = {"qwen3-30b-a3b at 45 %": (48, 128, 2765, 8), "gpt-oss-20b at 45 %": (24, 32, 345, 4)}  # L, E, S, K


OPEN_TASKS = 8  # slots that an engine's tasks hold


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

    def check(case: tuple[int, Rule, bool]) -> int:
        index, rule, engine = case
        layers, experts, slots, active = list(SIZES.values())[index % len(SIZES)]
        ids_per_call = active if index % 4 < 2 else 64
        rng = np.random.default_rng(index)
        key_score = jnp.asarray(rng.integers(0, 9, (2, layers * experts)), jnp.int32)
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
                "open_slots": open_slots(tables, slots) if engine else None,
            }
            both = (jax.tree.leaves(f(tables, ids, **extra)) for f in (ours, expected))
            for a, b in zip(*both, strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        return trials

    # Every rule with and without an engine, at one size and number of ids each: a compilation takes seconds.
    cases = [(i, rule, engine) for i, (rule, engine) in enumerate(itertools.product(get_args(Rule), (False, True)))]
    with ThreadPoolExecutor(len(cases)) as pool:
        return sum(pool.map(check, cases))


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


@dataclass(kw_only=True)
class Job:
    """A program over a donated state, to compile in a thread and time later."""

    labels: dict[str, Any]
    program: Callable[..., Any]
    state: Callable[[], Any]  # makes one
    inputs: tuple[Any, ...]
    calls: int  # chained in the program

    def compile(self) -> Any:
        return jax.jit(self.program, donate_argnums=0).lower(jax.eval_shape(self.state), *self.inputs).compile()

    def measure(self, compiled: Any, rounds: int = 15, in_flight: int = 6) -> float:
        """Median us per call. Programs follow each other without a wait, as decode steps do."""
        state, times = self.state(), []
        for round_ in range(rounds + 1):
            jax.block_until_ready(state)
            start = time.perf_counter()
            for _ in range(in_flight):
                state = compiled(state, *self.inputs)
            jax.block_until_ready(state)
            if round_:
                times.append((time.perf_counter() - start) / in_flight / self.calls * 1e6)
        return statistics.median(times)


def run_jobs(jobs: list[Job], deadline: float) -> list[dict[str, Any]]:
    """Labels of each job with `us`; compiles in threads, times with the threads at rest, stops at the deadline."""
    with ThreadPoolExecutor(max(1, min(12, (os.cpu_count() or 2) - 3))) as pool:
        futures = [pool.submit(job.compile) for job in jobs]
        wait(futures, timeout=max(0.0, deadline - time.monotonic()))
        pool.shutdown(cancel_futures=True)
    rows = []
    for job, future in zip(jobs, futures, strict=True):
        if future.cancelled() or time.monotonic() > deadline + 15:
            rows.append(job.labels | {"us": None})  # out of time
        else:
            rows.append(job.labels | {"us": round(job.measure(future.result()), 2)})
    return rows


def layer_jobs(implementation: Implementation, block_bytes: int, layers: int) -> Iterator[Job]:
    """Layers of slot_update alone and with miss_load, at 0, 1 and 4 misses per layer."""
    for name, (all_layers, experts, slots, active) in SIZES.items():
        pool = pinned(np.ones((experts, block_bytes // 2), np.uint16))
        cache_rows = min(slots, 256)  # slots beyond these are never given away here, which saves device memory
        for engine, misses, load in itertools.product((False, True), (0, 1, min(4, active)), (False, True)):
            tables, ids = steady_tables(all_layers * experts, slots, cache_rows, layers, experts, active, misses)
            landed = pinned(np.zeros(slots, np.int32)) if engine else None
            update = jax.jit(partial(slot_update, num_experts=experts, rule="lru", implementation=implementation))
            copy = jax.jit(partial(miss_load, implementation=implementation))

            def program(
                state: Any, pool: Array, ids: Any, landed: Any, *, load: bool, update: Any, copy: Any, experts: int
            ) -> Any:
                tables, cache, clock = state
                tasks = None if landed is None else jnp.arange(OPEN_TASKS, dtype=jnp.int32)
                for step in ids:
                    for layer, routed in enumerate(step):
                        first = layer * experts
                        tables, _, miss, dst, _ = update(
                            tables, routed, first_key=first, clock=clock, landed=landed, open_slots=tasks
                        )
                        if load:
                            cache = copy(cache, pool, miss, dst)
                    clock = clock + 1
                return tables, cache, clock

            def state(tables: SlotTables = tables, cache_rows: int = cache_rows) -> Any:
                cache = jnp.zeros((cache_rows, block_bytes // 2), jnp.uint16)
                return jax.tree.map(jnp.copy, tables), cache, jnp.int32(2)

            chain = partial(program, load=load, update=update, copy=copy, experts=experts)
            labels = {"size": name, "engine": engine, "misses": misses, "miss_load": load}
            # Both steps in one program: arguments at other addresses would have the CUDA graph changed on every run.
            inputs = pool, tuple(map(tuple, ids)), landed
            yield Job(labels=labels, program=chain, state=state, inputs=inputs, calls=2 * layers)


def link_jobs(layers: int, sweep: bool) -> Iterator[Job]:
    """miss_load alone, with so many of eight entries in use; the default first, then other divisions."""
    default = Config()
    configs = [default]
    if sweep:
        grid = itertools.product((8, 16, 32, 64), (8192, 16384, 32768), (4, 8))
        configs += [Config(programs=n, piece_bytes=size, num_warps=warps) for n, size, warps in grid]
    for block_bytes, misses in ((4 << 20, 1), (4 << 20, 4), (18_874_368, 1), (18_874_368, 4)):
        pool = pinned(np.ones((16, block_bytes // 2), np.uint16))
        rng = np.random.default_rng(misses)
        plan = []
        for _ in range(layers):
            experts, dst = np.full((2, 8), -1, np.int32)
            experts[:misses], dst[:misses] = rng.permutation(16)[:misses], rng.permutation(24)[:misses]
            plan.append((jnp.asarray(experts), jnp.asarray(dst)))
        for config in dict.fromkeys(configs):
            copy = jax.jit(partial(miss_load_gpu, config=config))

            def program(cache: Array, pool: Array, plan: Any, copy=copy) -> Array:
                for experts, dst in plan:
                    cache = copy(cache, pool, experts, dst)
                return cache

            labels = {"block_bytes": block_bytes, "misses": misses, **dataclasses.asdict(config)}
            state = partial(jnp.zeros, (24, block_bytes // 2), jnp.uint16)
            yield Job(labels=labels, program=program, state=state, inputs=(pool, plan), calls=layers)


def launch_job(layers: int) -> Job:
    """A kernel of one program that does nothing: what any launch costs."""

    def nothing(x_ref: Any, y_ref: Any) -> None:
        y_ref[0] = x_ref[0]

    params = plgpu.CompilerParams(num_warps=1, num_stages=1)

    def program(x: Array) -> Array:
        for _ in range(layers):
            x = pl.pallas_call(nothing, jax.ShapeDtypeStruct(x.shape, x.dtype), compiler_params=params)(x)
        return x

    return Job(labels={"launch": "empty"}, program=program, state=partial(jnp.zeros, 8), inputs=(), calls=layers)


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


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = list(rows[0])
    print(" | ".join(columns))
    for row in rows:
        print(" | ".join(str(row.get(column)) for column in columns), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--trials", type=int, default=10, help="random states per configuration")
    parser.add_argument("--block-bytes", type=int, default=4 << 20, help="bytes of one expert, beside slot_update")
    parser.add_argument("--layers", type=int, default=24, help="layers chained in one jit")
    parser.add_argument("--minutes", type=float, default=60, help="stop after about this time and write what there is")
    parser.add_argument("--sweep", action="store_true", help="also other divisions of the copied experts")
    args = parser.parse_args()
    implementation = resolve(None)
    if implementation != "gpu":
        print(f"bench_cache_kernels: needs a GPU, JAX found {jax.default_backend()}", file=sys.stderr)
        return 2
    deadline = time.monotonic() + 60 * args.minutes
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "slot_update states compared": check_slot_update(implementation, args.trials),
        "miss_load copies compared": check_miss_load(implementation),
    }
    print(*report.items(), sep="\n")
    parts = {
        "launch": [launch_job(10 * args.layers)],  # many, or it is the host that is timed
        "layers": list(layer_jobs(implementation, args.block_bytes, args.layers // 2)),
        "link": list(link_jobs(args.layers, args.sweep)),
    }
    for name, jobs in parts.items():
        report[name] = run_jobs(jobs, deadline)
        for row in report[name]:
            if row["us"] and "block_bytes" in row:
                row["GB/s"] = round(row["misses"] * row["block_bytes"] / row["us"] / 1e3, 1)
        print_table(report[name])
        if args.out:  # after every part: an interrupted run keeps what it has
            with open(args.out, "w") as file:
                json.dump(report, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
