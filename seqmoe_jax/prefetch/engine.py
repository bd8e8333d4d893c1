"""What every transfer engine does for the generation loop."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Shaped

from pallas_kernels.backend import Implementation
from pallas_kernels.plan_tasks import PlanConfig
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.options import Scheduler
from seqmoe_jax.prefetch.link import Link

ENGINES: dict[str, str] = {
    "auto": "dma with the kernels for CUDA GPUs, else none: what measured best (docs/benchmarks.md)",
    "none": "nothing is prefetched; a missing expert is loaded when its layer runs",
    "device_put": "asynchronous jax.device_put into staging arrays; plans are read from the steps' outputs",
    "callback": "the same, plans delivered by a JAX host callback from inside the step",
    "dma": "copies straight into reserved slots on a stream of their own, while the step runs (CUDA)",
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is made for."""

    plan: PlanConfig
    expert_bytes: int
    slots: int
    scheduler: Scheduler = "seqmoe"


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What tests make of a link. Every n-th transfer that has arrived is given up (0: none), the others are reported
    so much later, and a part is not started before so long after the one before."""

    drop_every: int = 0
    delay_s: float = 0.0
    throttle_s: float = 0.0


@dataclass(kw_only=True)
class Moved:
    """What an engine has done, in experts and bytes, since it was made.

    `given_up` were started and not completed, `late` never started, `dropped` by `Faults`.
    """

    landed: int = 0
    dropped: int = 0
    given_up: int = 0
    late: int = 0
    bytes: int = 0

    def since(self, before: Moved) -> Moved:
        """What was done after `before`."""
        return Moved(**{name: value - getattr(before, name) for name, value in vars(self).items()})


@runtime_checkable
class TransferEngine(Protocol):
    """One engine serves one slot cache. Its methods are called from the thread that dispatches steps."""

    name: str
    ahead: int  # plans are for the step so many steps on
    run_ahead: int  # steps that may be dispatched before the oldest one's outputs are read

    def link(self) -> Link:
        """What the next step gets."""
        ...

    def tell(self, tasks: Any, clock: Any) -> None:
        """The plans of a step whose outputs have arrived."""
        ...

    def start(self, blocks: Shaped[Array, "rows n"]) -> None:
        """A request begins to decode with this slot array."""
        ...

    def check(self, blocks: Shaped[Array, "rows n"]) -> None:
        """The slot array after a step was dispatched. Raises `RuntimeError` where it has moved."""
        ...

    def pause(self) -> None:
        """Returns when nothing is under way and nothing will be until `start`."""
        ...

    def moved(self) -> Moved: ...

    def fault(self) -> str | None:
        """What went wrong, once; the tokens are right all the same."""
        ...

    def inject(self, faults: Faults) -> None:
        """From now on the link is like that; for tests."""
        ...

    def kill(self) -> None:
        """Ends the worker at once, whatever is under way; for tests. The step must go on without it."""
        ...

    def close(self) -> None:
        """Ends the engine's thread."""
        ...


def resolve_engine(name: str, implementation: Implementation) -> str:
    """What "auto" means with these kernels. Raises `ConfigError` for an engine that they do not serve."""
    if name == "auto":
        return "dma" if implementation == "gpu" else "none"
    if name == "dma" and implementation != "gpu":
        raise ConfigError(f"the dma engine needs the kernels for CUDA GPUs, not {implementation!r}; use device_put")
    return name


def typical_transfer_cost(expert_bytes: int) -> float:
    """RHO before anything was measured: a PCIe 5 x16 link at 48 GB/s, a layer of 55 us (measured on an H200)."""
    return max(expert_bytes / 48e9 / 55e-6, 0.1)


def pinned(values: np.ndarray, device: jax.Device) -> tuple[Array, np.ndarray]:
    """An array in host memory that device programs read and write in place, and the host's view of the same bytes."""
    array = jax.device_put(values, SingleDeviceSharding(device, memory_kind="pinned_host"))
    array.block_until_ready()
    return array, host_view(array)


def host_view(array: Array) -> np.ndarray:
    """The bytes of an array in host memory, as they are, without a copy. Keep the array alive."""
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.ctypeslib.as_array(memory).view(array.dtype).reshape(array.shape)
