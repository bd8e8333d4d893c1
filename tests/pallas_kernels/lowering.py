"""Lower kernels for accelerators that this machine does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


def lower_for(platform: Literal["cuda", "tpu"], f: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> str:
    """StableHLO of `jax.jit(f)` for the platform; raises where a kernel cannot be lowered."""
    device = {
        "cuda": AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu"),
        "tpu": AbstractDevice("TPU v5e", num_cores=1, platform="tpu"),
    }[platform]
    checks = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        export = jax.export.export(jax.jit(f, donate_argnums=donate), platforms=[platform], disabled_checks=checks)
        return str(export(*args).mlir_module())
