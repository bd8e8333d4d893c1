"""What users choose of an engine, said once: `load`, every command, `serve`, `bench` and the docs share it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

from pallas_kernels.backend import Implementation
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.experts.policy import Policy, check_policy
from seqmoe_jax.prefetch.engine import Scheduler, check_engine

Residency = float | int | Literal["least"]

MAX_BATCH = 8
THRESHOLD = 0.2  # least probability of a prefetch task; chosen in simulation (`simulation.settings`)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a model is loaded and run. Every field has a default that works.

    residency: share of the experts that have a slot, in (0, 1], or "least": K per sequence. Default: as many as fit.
    device_memory: instead of a residency, a budget for weights, slots, keys and values and workspace: "12GiB" or bytes.
    policy: which expert leaves when a missing one needs its slot; see `seqmoe_jax.experts.policy`.
    predictor: what policy seqmoe forecasts by: "auto" (the one that ships for this model, else the past alone), a
        directory that `seqmoe train-predictor` wrote, or "none".
    transfers: the engine that moves experts ahead of their use, where there is a predictor: "auto" (what measured best:
        `dma` on NVIDIA GPUs, else none), or one of `seqmoe_jax.prefetch.engine.ENGINES`.
    max_batch: most sequences decoded together, 1 to 8. Each adds K experts to the least number of slots.
    context: longest prompt + new tokens; memory is planned for it. Default: 4096, or what the model was made for if
        that is less.
    dtype: of activations, "float32" or "bfloat16". Default: float32 on a CPU, the checkpoint's dtype elsewhere.
    kernels: "xla", "gpu" or "tpu". Default: the best that this backend has (`seqmoe doctor` shows it).

    What benchmarks vary, and others leave alone:

    decode_kernels: kernels for attention, routing and projections too, where the experts' are those for GPUs; False
        leaves them to XLA, which is slower (docs/benchmarks.md).
    scheduler: the rule that orders prefetch tasks: "seqmoe" (Algorithm 1 of the paper), "moe-infinity" or "promoe".
    tasks: most tasks that may be open at a time, each of which holds a slot. None: one more than fit into the steps
        that are planned for.
    threshold: least probability of a task.
    steps_ahead: how many steps are planned for: beyond the coming one by the predictor's rollout (paper 5.3), which
        costs as much as a forecast for each.
    refine: the running step is forecast anew at half of its layers (paper 6.1).
    """

    residency: Residency | None = None
    device_memory: str | int | None = None
    policy: Policy | str = "seqmoe"
    predictor: str | Path = "auto"
    transfers: str = "auto"
    max_batch: int = 1
    context: int | None = None
    dtype: str | None = None
    kernels: Implementation | None = None
    decode_kernels: bool = True
    scheduler: Scheduler = "seqmoe"
    tasks: int | None = None
    threshold: float = THRESHOLD
    steps_ahead: int = 1
    refine: bool = True

    def __post_init__(self) -> None:
        check_policy(self.policy)
        check_engine(self.transfers)
        if self.steps_ahead < 1:
            raise ConfigError(f"transfers are planned for at least 1 step, got {self.steps_ahead} (steps_ahead)")
        if self.residency is not None and self.device_memory is not None:
            raise ConfigError("give either a residency or a device memory, not both")


class EngineKeywords(TypedDict, total=False):
    """The fields of `EngineOptions` as keyword arguments, for signatures; a test holds the two together."""

    residency: Residency | None
    device_memory: str | int | None
    policy: Policy | str
    predictor: str | Path
    transfers: str
    max_batch: int
    context: int | None
    dtype: str | None
    kernels: Implementation | None
    decode_kernels: bool
    scheduler: Scheduler
    tasks: int | None
    threshold: float
    steps_ahead: int
    refine: bool
