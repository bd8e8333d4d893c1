"""Loads a checkpoint; prints time, rate and peak memory as JSON, beside a plain read of the same files.

python scripts/bench_loading.py DIR [--workers N] [--drop-cache]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from seqmoe_jax.checkpoints.names import check_names, names_of
from seqmoe_jax.checkpoints.read import iter_dense
from seqmoe_jax.checkpoints.resolve import read_config
from seqmoe_jax.checkpoints.safetensors import open_checkpoint
from seqmoe_jax.errors import SeqMoEError
from seqmoe_jax.experts.host_pool import load_host_pool
from seqmoe_jax.models.families import spec_from_config


def plain_read(files: list[Path]) -> float:
    """Seconds that one thread takes to read the files front to back into one buffer."""
    buffer = bytearray(16 << 20)
    start = time.perf_counter()
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def drop_cache(files: list[Path]) -> None:
    """Asks the kernel to forget the files' pages. It may keep pages that are dirty or mapped."""
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peak_memory() -> int:
    """Highest resident set of this process so far, in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def bench(directory: Path, *, workers: int | None, cold: bool) -> dict[str, Any]:
    device = jax.devices()[0]
    spec = spec_from_config(read_config(directory))
    files = sorted(directory.glob("*.safetensors"))
    prepare: Callable[[list[Path]], object] = drop_cache if cold else (lambda files: None)
    before = peak_memory()
    prepare(files)
    start = time.perf_counter()
    checkpoint = open_checkpoint(directory)
    names = names_of(spec, checkpoint.names)
    check_names(checkpoint, names)
    opened = time.perf_counter()
    pool = load_host_pool(
        checkpoint,
        names,
        spec.expert_layout,
        num_layers=len(spec.moe_layers),
        num_experts=spec.moe.num_experts,
        device=device,
        workers=workers,
    )
    loaded = time.perf_counter()
    dtypes = dict.fromkeys(names.dense, np.dtype(ml_dtypes.bfloat16))
    dense = {name: jax.device_put(value, device) for name, value in iter_dense(checkpoint, names, dtypes=dtypes)}
    jax.block_until_ready((pool, dense))
    end = time.perf_counter()
    peak = peak_memory()
    total = checkpoint.nbytes
    prepare(files)
    plain = plain_read(files)
    return {
        "directory": str(directory),
        "backend": jax.default_backend(),
        "checkpoint_bytes": total,
        "page_cache": "dropped before each read" if cold else "as it was",
        "open_and_check_s": round(opened - start, 3),
        "experts_s": round(loaded - opened, 3),
        "dense_s": round(end - loaded, 3),
        "seconds": round(end - start, 3),
        "GB_per_s": round(total / (end - start) / 1e9, 3),
        "plain_read_s": round(plain, 3),
        "plain_read_GB_per_s": round(total / plain / 1e9, 3),
        "time_over_plain_read": round((end - start) / plain, 3),
        "peak_bytes": peak,
        "peak_bytes_before": before,
        "peak_over_checkpoint": round(peak / total, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--workers", type=int)
    parser.add_argument(
        "--drop-cache", action="store_true", help="start each read with the files out of the page cache"
    )
    args = parser.parse_args()
    try:
        print(json.dumps(bench(args.directory, workers=args.workers, cold=args.drop_cache), indent=2))
    except SeqMoEError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
