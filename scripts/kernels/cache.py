"""Check and time the slot cache's kernels as a decode step uses them: `slot_update`, `miss_load`, an empty launch.

    python -m scripts.kernels.cache --minutes 1.5 --out cache.json [--sweep]

`layers` chains the layers of two steps, with a steady number of misses per layer; `link` is loading alone, with
`--sweep` in other divisions; `launch` is a kernel of one program that does nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_kernels.miss_load import MissLoadConfig, miss_load
from pallas_kernels.slot_update import Rule, SlotState, SlotTables, slot_update
from scripts.kernels.harness import Job, difference, parser, pinned, run

# L, E, S, K.
SHAPES = {"qwen3-30b": (48, 128, 2765, 8), "gpt-oss-20b": (24, 32, 345, 4), "tiny": (2, 8, 14, 2)}
OPEN_TASKS = 8  # slots that an engine's tasks hold


def random_tables(rng: np.random.Generator, keys: int, slots: int, engine: bool) -> tuple[SlotTables, Any]:
    """Consistent tables with all kinds of slots, tags of which half have come back, and the slots under way."""
    state = rng.choice(4, slots, p=[0.02, 0.78, 0.1, 0.1] if engine else [0.02, 0.98, 0, 0]).astype(np.int32)
    key_of_slot = np.where(state == SlotState.EMPTY, -1, rng.permutation(keys)[:slots]).astype(np.int32)
    resident = (state == SlotState.USED) | (state == SlotState.COMPUTE)
    slot_of_key = np.full(keys, -1, np.int32)
    slot_of_key[key_of_slot[resident]] = np.flatnonzero(resident)
    tag = np.where(state == SlotState.FETCH, rng.integers(1, 999, slots), 0).astype(np.int32)
    score = np.where(resident, rng.integers(0, 9, slots), 0).astype(np.int32)
    tables = SlotTables(*map(jnp.asarray, (slot_of_key, key_of_slot, state, tag, score)))
    if not engine:
        return tables, {}
    under_way = np.flatnonzero(state >= SlotState.FETCH)
    open_slots = np.pad(under_way, (0, slots - len(under_way)), constant_values=-1).astype(np.int32)
    landed = np.where(rng.random(slots) < 0.5, tag, 0).astype(np.int32)
    return tables, {"landed": jnp.asarray(landed), "open_slots": jnp.asarray(open_slots)}


def compare_states(name: str, engine: bool, trials: int, interpret: bool) -> float:
    """Random states through both implementations, under every rule: nothing may differ."""
    layers, experts, slots, active = SHAPES[name]
    rng = np.random.default_rng()
    key_score = jnp.asarray(rng.integers(0, 9, (2, layers * experts)), jnp.int32)
    for rule in get_args(Rule):
        call = partial(slot_update, num_experts=experts, rule=rule, clock=jnp.int32(50), key_score=key_score)
        ours, expected = (jax.jit(partial(call, implementation=each, interpret=interpret)) for each in ("gpu", "xla"))
        for trial in range(trials):
            tables, extra = random_tables(rng, layers * experts, slots, engine)
            ids = jnp.asarray(rng.integers(-1, experts, active), jnp.int32)
            extra["first_key"] = jnp.int32(trial % layers * experts)
            difference(ours(tables, ids, **extra), expected(tables, ids, **extra), 0.0)
    return 0.0


def layer_jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Layers of slot_update alone and with miss_load, with and without an engine."""
    length = args.block_bytes // 2
    how: dict[str, Any] = {"implementation": "gpu", "interpret": args.interpret}
    copy = jax.jit(partial(miss_load, **how))
    for name, engine in itertools.product(args.shapes, (False, True)):
        all_layers, experts, slots, active = SHAPES[name]
        update = jax.jit(partial(slot_update, num_experts=experts, rule="lru", **how))
        layers = min(all_layers, args.layers // 2) or 1
        place = jnp.asarray if args.interpret else pinned  # interpreted kernels know no memory spaces
        pool = place(np.ones((experts, length), np.uint16))
        rows = min(slots, 256)  # slots beyond these are never given away here, which saves device memory
        for misses, load in itertools.product((0, 1, min(4, active)), (False, True)):
            tables, ids = steady_tables(all_layers * experts, slots, layers, experts, active, misses)
            tasks: dict[str, Any] = {"open_slots": jnp.arange(OPEN_TASKS, dtype=jnp.int32)} if engine else {}
            if engine:
                tasks["landed"] = place(np.zeros(slots, np.int32))

            program = partial(layer_chain, update, copy if load else None, experts)
            state = partial(tables_and_cache, tables, rows, length)
            # Both steps in one program: arguments at other addresses would have the CUDA graph changed on every run.
            yield Job(
                labels={"layers": name, "engine": engine, "misses": misses, "miss_load": load}, program=program,
                state=state, inputs=(pool, tuple(map(tuple, ids)), tasks), calls=2 * layers,
                check=None if misses or load else partial(compare_states, name, engine, args.trials, args.interpret),
            )  # fmt: skip


def tables_and_cache(tables: SlotTables, rows: int, length: int) -> Any:
    return jax.tree.map(jnp.copy, tables), jnp.zeros((rows, length), jnp.uint16), jnp.int32(2)


def layer_chain(update: Any, copy: Any, experts: int, state: Any, pool: Array, ids: Any, engine: Any) -> Any:
    tables, cache, clock = state
    for step in ids:
        for layer, routed in enumerate(step):
            tables, _, miss, dst, _ = update(tables, routed, first_key=layer * experts, clock=clock, **engine)
            if copy is not None:
                cache = copy(cache, pool, miss, dst)
        clock = clock + 1
    return tables, cache, clock


def steady_tables(
    keys: int, slots: int, layers: int, experts: int, active: int, misses: int
) -> tuple[SlotTables, Array]:
    """Tables and two alternating routings `ids[2, layers, active]` with `misses` misses per layer, each step.

    `active - misses` experts of each layer stay resident. The others alternate between two groups; there is room for
    one group, and LRU gives each layer's to the next step's.
    """
    stay = active - misses
    fixed = [layer * experts + e for layer in range(layers) for e in range(stay)]
    # On equal clocks the lower slot goes first, so the group lies below what stays. What no layer touches is never
    # evicted: it has the highest score.
    resident = [layer * experts + stay + e for layer in range(layers) for e in range(misses)] + fixed
    held = np.array(resident + list(range(layers * experts, keys)), np.int32)[:slots]
    key_of_slot = np.full(slots, keys - 1, np.int32)
    key_of_slot[: len(held)] = held
    used = np.arange(slots) < len(held)  # the other slots are under way for good
    score = np.where(used & (np.arange(slots) >= len(resident)), 1 << 30, 0).astype(np.int32)
    slot_of_key = np.full(keys, -1, np.int32)
    slot_of_key[held] = np.arange(len(held))
    state = np.where(used, SlotState.USED, SlotState.FETCH).astype(np.int32)
    groups = [[*range(stay), *range(stay + g * misses, stay + (g + 1) * misses)] for g in (1, 0)]
    tables = SlotTables(*map(jnp.asarray, (slot_of_key, key_of_slot, state, (~used).astype(np.int32), score)))
    return tables, jnp.asarray([[group] * layers for group in groups], jnp.int32)


def link_jobs(args: argparse.Namespace) -> Iterator[Job]:
    """miss_load alone, one or four of eight entries in use; the default first, then other divisions."""
    default = MissLoadConfig()
    grid = itertools.product((8, 16, 32, 64), (8192, 16384, 32768), (4, 8)) if args.sweep else ()
    configs = [default, *(MissLoadConfig(programs=n, piece_bytes=size, num_warps=w) for n, size, w in grid)]
    for block_bytes, misses in itertools.product(args.link_bytes, (1, 4)):
        blocks = np.random.default_rng(0).integers(0, 2**16, (16, block_bytes // 2)).astype(np.uint16)
        pool = jnp.asarray(blocks) if args.interpret else pinned(blocks)
        rng = np.random.default_rng(misses)
        plan = np.full((args.layers, 2, 8), -1, np.int32)
        for experts, dst in plan:
            experts[:misses], dst[:misses] = rng.permutation(16)[:misses], rng.permutation(24)[:misses]
        state = partial(jnp.zeros, (24, block_bytes // 2), jnp.uint16)
        for config in dict.fromkeys(configs):
            call = partial(miss_load, implementation="gpu", interpret=args.interpret, config=config)

            inputs = pool, tuple(tuple(map(jnp.asarray, each)) for each in plan)
            yield Job(
                labels={"link": block_bytes, "misses": misses, **dataclasses.asdict(config)}, 
                program=partial(link_chain, jax.jit(call)),
                state=state, inputs=inputs, calls=args.layers, nbytes=misses * block_bytes,
                check=partial(check_load, call, state, pool, plan[0]),
            )  # fmt: skip


def link_chain(call: Any, cache: Array, pool: Array, plan: Any) -> Array:
    for experts, dst in plan:
        cache = call(cache, pool, experts, dst)
    return cache


def check_load(call: Any, state: Any, pool: Array, plan: np.ndarray) -> float:
    """The right bytes, where the slots were."""
    cache, (experts, dst) = state(), plan
    address, want = cache.unsafe_buffer_pointer(), np.array(cache)
    want[dst[dst >= 0]] = np.asarray(pool)[experts[dst >= 0]]
    got = jax.jit(call, donate_argnums=0)(cache, pool, *map(jnp.asarray, plan))
    if not call.keywords["interpret"] and got.unsafe_buffer_pointer() != address:
        raise AssertionError("miss_load moved the slots")
    return difference(got, want, 0.0)


def launch_jobs(args: argparse.Namespace) -> Iterator[Job]:
    """What any launch costs."""

    def nothing(x_ref: Any, y_ref: Any) -> None:
        y_ref[0] = x_ref[0]

    calls = 10 * args.layers  # many, or it is the host that is timed
    params = plgpu.CompilerParams(num_warps=1, num_stages=1)
    call = pl.pallas_call(
        nothing, jax.ShapeDtypeStruct((8,), jnp.float32), compiler_params=params, interpret=args.interpret
    )

    def program(x: Array) -> Array:
        for _ in range(calls):
            x = call(x)
        return x

    yield Job(labels={"launch": "empty"}, program=program, state=partial(jnp.zeros, 8), calls=calls)


PARTS = {"launch": launch_jobs, "layers": layer_jobs, "link": link_jobs}


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__, PARTS, SHAPES)
    options.add_argument("--trials", type=int, default=10, help="random states per rule")
    options.add_argument("--block-bytes", type=int, default=4 << 20, help="bytes of one expert, beside slot_update")
    options.add_argument("--link-bytes", type=int, nargs="+", default=[4 << 20, 18_874_368], help="alone")
    return run(options, PARTS, argv)


if __name__ == "__main__":
    sys.exit(main())
