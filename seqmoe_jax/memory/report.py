"""`seqmoe plan`: will a model fit, at which residency, and what it needs. Reads its `config.json` and no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.backend import resolve
from seqmoe_jax.checkpoints.resolve import resolve_config
from seqmoe_jax.doctor import link_bandwidth
from seqmoe_jax.errors import ResidencyError
from seqmoe_jax.host_memory import host_memory
from seqmoe_jax.inputs import read_json
from seqmoe_jax.loading import activation_dtype
from seqmoe_jax.memory.fit import free_bytes, pool_bytes
from seqmoe_jax.memory.plan import DEFAULT_CONTEXT, MemoryPlan, least_slots, plan_memory
from seqmoe_jax.models.families import spec_from_config
from seqmoe_jax.options import EngineOptions, parse_bytes
from seqmoe_jax.presets import preset_names, preset_path


def size_up(model: str, options: EngineOptions) -> dict[str, Any]:
    """The report as JSON values: sizes in bytes, times in seconds, None where unknown.

    `model` is what `load` takes, or the name of a preset. The memory is the `device_memory` of the options, else what
    the device here has free; a device that does not say (a CPU) is taken to hold everything. Raises `CheckpointError`,
    `ConfigError` or, for a residency that can never work, `ResidencyError`; a model that does not fit is an answer.
    """
    preset = model in preset_names() and not Path(model).is_dir()
    spec = spec_from_config(read_json(preset_path(model)) if preset else resolve_config(model))
    device = jax.devices()[0]
    budget = free_bytes(device) if options.device_memory is None else parse_bytes(options.device_memory)
    batch, context = options.max_batch, min(options.context or DEFAULT_CONTEXT, spec.context)
    dtype, kernels = activation_dtype(spec, device, options.dtype), resolve(options.kernels)
    make = partial(plan_memory, spec, batch=batch, context=context, activation_dtype=dtype)
    least, full = make(residency="least"), make(residency=1.0)
    plan, reason = None, None
    try:
        plan = make(residency=options.residency, device_memory=None if options.residency else budget)
        if budget is not None and plan.total > budget:
            reason = f"this residency needs {_gb(plan.total)} of device memory, there are {_gb(budget)}"
    except ResidencyError as error:
        if options.residency is not None:
            raise
        reason = str(error)
    block, pool, host = spec.expert_layout.block_bytes, pool_bytes(spec), host_memory()
    reason = host.lacks(pool, "the experts") or reason
    # What one step moves if none of its experts is resident.
    moved = len(spec.moe_layers) * least_slots(spec, batch) * block
    link = link_bandwidth(device) if device.platform != "cpu" else None
    return {
        "model": model,
        "family": spec.family,
        "fits": reason is None,
        "reason": reason,
        "device": device.device_kind,
        "device_memory": budget,
        "context": context,
        "batch": batch,
        "activations": str(dtype),
        "kernels": kernels,
        "experts": spec.num_keys,
        "expert_bytes": block,
        "plan": None if plan is None else _sizes(plan),
        "least": _sizes(least),
        "full": _sizes(full),
        "host_pool": pool,
        "host_memory": host.total,
        "host_memory_available": host.available,
        "step_bytes_all_missing": moved,
        "link_bandwidth": link,
        "step_seconds_all_missing": None if link is None else moved / link,
    }


def describe(report: Mapping[str, Any]) -> str:
    """The report for a person."""
    plan, least, full = report["plan"], report["least"], report["full"]
    memory = "unknown, taken as enough" if report["device_memory"] is None else _gb(report["device_memory"])
    lines = [
        f"{report['model']}: {report['family']}, {report['experts']} experts of {report['expert_bytes'] / 1e6:.2f} MB; "
        f"{report['device']}, activations {report['activations']}, kernels {report['kernels']}",
        f"device memory {memory}; context {report['context']}, batch {report['batch']}",
        f"it fits: {_shares(plan)}" if report["fits"] else f"it does not fit: {report['reason']}",
        *([_parts(plan)] if plan is not None else []),
        f"host memory: {_gb(report['host_pool'])} pinned for the experts, of {_known(report['host_memory'])}; "
        f"available now: {_known(report['host_memory_available'])}",
        f"the least that works: {_gb(least['total'])} on the device with {_shares(least)}",
        f"all experts resident: {_gb(full['total'])} on the device",
    ]
    if report["link_bandwidth"] is not None:
        moved, link = report["step_bytes_all_missing"], report["link_bandwidth"]
        lines.append(
            f"a step that misses every expert moves {_gb(moved)}: {report['step_seconds_all_missing'] * 1e3:.0f} ms at "
            f"the {link / 1e9:.1f} GB/s just measured; at a hit rate of h, 1 - h of that, beside the step's own time"
        )
    return "\n".join(lines)


def _sizes(plan: MemoryPlan) -> dict[str, Any]:
    return asdict(plan) | {"total": plan.total}


def _shares(plan: Mapping[str, Any]) -> str:
    return f"{plan['slots']} slots (residency {plan['residency']:.3f})"


def _parts(plan: Mapping[str, Any]) -> str:
    parts = {name: size for name, size in plan.items() if name not in ("slots", "residency", "total")}
    return f"  {_gb(plan['total'])}: " + ", ".join(f"{n.replace('_', ' ')} {_gb(size)}" for n, size in parts.items())


def _known(size: int | None) -> str:
    return "what the machine gives when it is used" if size is None else _gb(size)


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
