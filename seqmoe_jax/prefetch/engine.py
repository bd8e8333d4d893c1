"""What every transfer engine does for the generation loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

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


@dataclass(kw_only=True)
class TransferCounts:
    """What an engine has done, in experts and bytes, since it was made.

    `given_up` were started and not completed, `late` never started; `bytes` are of all that was moved.
    """

    landed: int = 0
    given_up: int = 0
    late: int = 0
    bytes: int = 0

    def since(self, before: TransferCounts) -> TransferCounts:
        """What was done after `before`."""
        return TransferCounts(**{name: value - getattr(before, name) for name, value in vars(self).items()})


@runtime_checkable
class TransferEngine(Protocol):
    """One engine serves one slot cache. Its methods are called from the thread that dispatches steps."""

    name: str
    ahead: int
    """Plans are for the step so many steps on."""
    run_ahead: int
    """Steps that may be dispatched before the oldest one's outputs are read."""
    channel: int | None
    """Of the host callback that brings the plans, where one does (`channels`)."""

    @property
    def transfer_cost(self) -> float | None:
        """RHO as measured: the time of a transfer over that of a layer. None where it is not measured."""
        ...

    def link(self) -> Link:
        """What the next step gets."""
        ...

    def deliver(self, tasks: Any, clock: Any) -> None:
        """The last plan `tasks` [5, N] of a step whose outputs have arrived, and the position at its end."""
        ...

    def start(self, blocks: Shaped[Array, "S n"]) -> None:
        """A request begins to decode with this slot array."""
        ...

    def check(self, blocks: Shaped[Array, "S n"]) -> None:
        """The slot array after a step was dispatched. Raises `RuntimeError` where it has moved."""
        ...

    def pause(self) -> None:
        """Returns when nothing is in flight and nothing will be until `start`."""
        ...

    def counts(self) -> TransferCounts: ...

    def fault(self) -> str | None:
        """What went wrong, once; the tokens are right all the same."""
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
