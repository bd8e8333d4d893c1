"""Loads a checkpoint; prints time, rate and peak memory as JSON, beside a plain read of the same files (Linux).

python -m scripts.checks.loading DIR [--drop-cache]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import jax

from seqmoe_jax.loading import load_model


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
    """Highest resident set of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(directory: Path, *, cold: bool) -> dict[str, Any]:
    jax.devices()  # starts the backend, which is not what is measured
    files = sorted(directory.glob("*.safetensors"))
    total = sum(path.stat().st_size for path in files)
    if cold:
        drop_cache(files)
    before, start = peak_memory(), time.perf_counter()
    model, _ = load_model(directory)
    jax.block_until_ready((model.pools, model.weights))
    seconds, peak = time.perf_counter() - start, peak_memory()
    if cold:
        drop_cache(files)
    plain = plain_read(files)
    return {
        "directory": str(directory),
        "backend": jax.default_backend(),
        "checkpoint_bytes": total,
        "page_cache": "dropped before each read" if cold else "as it was",
        "seconds": round(seconds, 3),
        "GB_per_s": round(total / seconds / 1e9, 3),
        "plain_read_s": round(plain, 3),
        "time_over_plain_read": round(seconds / plain, 3),
        "peak_bytes": peak,
        "peak_bytes_before": before,
        "peak_over_checkpoint": round(peak / total, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--drop-cache", action="store_true", help="start each read with the files out of the page cache"
    )
    args = parser.parse_args()
    print(json.dumps(measure(args.directory, cold=args.drop_cache), indent=2))


if __name__ == "__main__":
    main()
