"""Whether a model can be loaded, asked before anything large is read or allocated."""

from __future__ import annotations

import jax
import numpy as np

from seqmoe_jax.errors import ResidencyError
from seqmoe_jax.host_memory import host_memory
from seqmoe_jax.memory.plan import DEFAULT_CONTEXT, plan_memory
from seqmoe_jax.models.spec import ModelSpec
from seqmoe_jax.options import EngineOptions, parse_bytes


def pool_bytes(spec: ModelSpec) -> int:
    """Host memory that all experts take: their blocks and nothing else."""
    return spec.num_keys * spec.expert_layout.block_bytes


def free_bytes(device: jax.Device) -> int | None:
    """What the device has free; None where its backend does not say, as that of a CPU."""
    stats = device.memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None


def check_host(spec: ModelSpec, *_: object) -> None:
    """Raises `ResidencyError`, with the numbers, where the host cannot hold the experts."""
    if reason := host_memory().lacks(pool_bytes(spec), "the experts"):
        raise ResidencyError(f"{reason}; take a smaller or a quantised model, or a machine with more memory")


def check_fits(spec: ModelSpec, dtype: np.dtype, device: jax.Device, *, options: EngineOptions) -> None:
    """`check_host`, and the same for the device and what the options ask for there."""
    check_host(spec)
    plan_memory(
        spec,
        residency=options.residency,
        device_memory=None if options.device_memory is None else parse_bytes(options.device_memory),
        available=free_bytes(device),
        batch=options.max_batch,
        context=min(options.context or DEFAULT_CONTEXT, spec.context),
        activation_dtype=dtype,
    )
