"""What a preset's pool takes of this machine's memory, and how fast it is filled and read: JSON, one line each (Linux).

python -m scripts.checks.pool_memory PRESET [PRESET ...] [--layers N]
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backend import default_implementation
from pallas_kernels.miss_load import miss_load
from seqmoe_jax.experts.random_pool import random_host_pool
from seqmoe_jax.models.families import spec_from_config
from seqmoe_jax.presets import preset_path


def memory_in_use() -> int:
    """Of the whole machine, in bytes, but for what the kernel would give back at once: pinned pages are in it, whoever
    allocated them, while a process's own count misses those of the driver."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        fields[name] = int(value.split()[0]) * 1024
    given_back = ("MemFree", "Buffers", "Cached", "SReclaimable")
    return fields["MemTotal"] - sum(fields[name] for name in given_back)


def measure(preset: str, layers: int | None) -> dict[str, Any]:
    spec = spec_from_config(json.loads(preset_path(preset).read_text()))
    layout, count = spec.expert_layout, layers or len(spec.moe_layers)
    jnp.zeros(8).block_until_ready()
    before, start = memory_in_use(), time.perf_counter()
    pool = random_host_pool(layout, count, spec.moe.num_experts)
    seconds, held = time.perf_counter() - start, sum(array.nbytes for array in pool)
    taken = memory_in_use() - before
    kinds = {array.sharding.memory_kind for array in pool}

    load = jax.jit(partial(miss_load, implementation=default_implementation()), donate_argnums=0)
    slots, ids = jnp.zeros((8, layout.block_elems), layout.storage), jnp.arange(8, dtype=jnp.int32)
    rates = []
    for array in (pool * 12)[:12]:
        started = time.perf_counter()
        slots = load(slots, array, ids, ids)
        slots.block_until_ready()
        rates.append(8 * layout.block_bytes / (time.perf_counter() - started))
    del pool, array
    gc.collect()
    return {
        "preset": preset, "layers": count, "memory_kinds": sorted(kinds), "bytes": held, "taken": taken,
        "taken_over_bytes": round(taken / held, 4), "seconds": round(seconds, 2),
        "GB_per_s": round(held / seconds / 1e9, 2),
        "kernel_reads_GB_per_s": round(sorted(rates)[len(rates) // 2] / 1e9, 1), "left_after": memory_in_use() - before,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("presets", nargs="+")
    parser.add_argument("--layers", type=int, help="of experts; default: all that the preset has")
    args = parser.parse_args()
    for preset in args.presets:
        print(json.dumps(measure(preset, args.layers)), flush=True)


if __name__ == "__main__":
    main()
