"""`seqmoe doctor`: what this machine has, measured where it can be, and which kernels will run."""

from __future__ import annotations

import platform
import shutil
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels.backend import default_implementation
from seqmoe_jax.compilation import cache_directory, enable_compilation_cache
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.host_memory import host_memory
from seqmoe_jax.presets import preset_names

PROBE_BYTES = 256 << 20


def examine() -> dict[str, Any]:
    """The report as JSON values. Bandwidths in bytes per second, memories in bytes; None where unknown."""
    device = jax.devices()[0]
    memories = sorted(memory.kind for memory in device.addressable_memories())
    stats = device.memory_stats() or {}
    cache = cache_fault = None
    try:
        cache = cache_directory()
        enable_compilation_cache()
    except ConfigError as error:
        cache_fault = str(error)
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("seqmoe-jax", "jax", "jaxlib", "flax", "numpy")},
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "devices": len(jax.devices()),
        "compute_capability": getattr(device, "compute_capability", None),
        "device_memory": stats.get("bytes_limit"),
        "host_memory": host_memory().total,
        "memory_kinds": memories,
        "host_to_device": link_bandwidth(device) if "pinned_host" in memories else None,
        "kernels": default_implementation(),
        "compilation_cache": None if cache is None else str(cache / "xla"),
        "compilation_cache_fault": cache_fault,
        "cache_free": None if cache is None else _free(cache),
        "presets": preset_names(),
    }


def describe(report: dict[str, Any]) -> str:
    """The report for a person."""

    def size(value: int | None) -> str:
        return "unknown" if value is None else f"{value / 1e9:.1f} GB"

    link = report["host_to_device"]
    reason = {
        "gpu": "Pallas, Triton lowering",
        "xla": "plain XLA, the reference path",
        "tpu": "Pallas for TPU",
    }[report["kernels"]]
    lines = [
        f"python {report['python']}, " + ", ".join(f"{name} {number}" for name, number in report["packages"].items()),
        f"backend: {report['backend']}, {report['devices']} x {report['device']}"
        + (f" (compute capability {report['compute_capability']})" if report["compute_capability"] else ""),
        f"memory: device {size(report['device_memory'])}, host {size(report['host_memory'])}; "
        f"kinds {', '.join(report['memory_kinds'])}",
        "pinned host to device: "
        + ("no pinned memory" if link is None else f"{link / 1e9:.1f} GB/s (256 MiB, median of 5)"),
        f"kernels: {report['kernels']} ({reason})",
        f"compilation cache: {report['compilation_cache_fault'] or report['compilation_cache']}",
        f"presets: {', '.join(report['presets'])}",
    ]
    return "\n".join(lines)


def link_bandwidth(device: jax.Device) -> float:
    """Bytes per second from pinned host memory to the device: 256 MiB, median of 5."""
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    source = jax.device_put(np.ones(PROBE_BYTES, np.uint8), pinned)
    target = jax.sharding.SingleDeviceSharding(device)
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        jax.device_put(source, target).block_until_ready()
        seconds.append(time.perf_counter() - started)
    return PROBE_BYTES / float(np.median(seconds[1:]))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _free(path: Path) -> int | None:
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError as error:
        print(f"seqmoe: {error}", file=sys.stderr)
        return None
