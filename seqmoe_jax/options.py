"""What users choose, said once: `load`, `generate`, every command, `serve`, `bench` and the docs share these classes.

Imports no JAX, so that the command line can say what there is to choose at once.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from seqmoe_jax.errors import ConfigError, PromptError

Policy = Literal["seqmoe", "lru", "lfu", "prefill-hot", "full"]  # what each of them evicts: `experts.policy`
Transfers = Literal["auto", "none", "device_put", "callback", "dma"]  # how each moves experts: `prefetch.engine`
Scheduler = Literal["seqmoe", "moe-infinity", "promoe"]  # what each moves next: `prefetch.schedule`
Kernels = Literal["xla", "gpu", "tpu"]  # `pallas_kernels.backend.Implementation`
Residency = float | int | Literal["least"]

MAX_BATCH = 8
THRESHOLD = 0.2  # least probability of a prefetch task; chosen in simulation (`simulation.settings`)


def check_policy(policy: str) -> Policy:
    """The policy named, or `ConfigError` with the names there are."""
    for known in get_args(Policy):
        if policy == known:
            return known
    raise ConfigError(f"unknown policy {policy!r}: expected one of {', '.join(get_args(Policy))}")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a model is loaded and run. Every field has a default that works.

    residency: share of the experts that have a slot, in (0, 1], or "least": K per sequence. Default: as many as fit.
    device_memory: instead of a residency, a budget for weights, slots, keys and values and workspace: "12GiB" or bytes.
    policy: which expert leaves when a missing one needs its slot: "seqmoe" (what the forecast needs least), "lru",
        "lfu", "prefill-hot" (what the prompt used most stays) or "full" (what was resident after loading stays).
    predictor: what policy seqmoe forecasts by: "auto" (the one that ships for this model, else the past alone), a
        directory that `seqmoe train-predictor` wrote, or "none".
    transfers: the engine that moves experts ahead of their use, where there is a predictor: "auto" (what measured best:
        `dma` on NVIDIA GPUs, else none), "none", "device_put", "callback" or "dma".
    max_batch: most sequences decoded together, 1 to 8. Each adds K experts to the least number of slots.
    context: longest prompt + new tokens; memory is planned for it. Default: 4096, or what the model was made for if
        that is less.
    dtype: of activations, "float32" or "bfloat16". Default: float32 on a CPU, the checkpoint's dtype elsewhere.
    kernels: "xla", "gpu" or "tpu". Default: the best that this backend has (`seqmoe doctor` shows it).

    What benchmarks vary, and others leave alone:

    decode_kernels: kernels for attention, routing and projections too, where the experts' are those for GPUs; False
        leaves them to XLA, which is slower (docs/benchmarks.md).
    scheduler: the rule that orders prefetch tasks: "seqmoe" (Algorithm 1 of the paper), "moe-infinity" or "promoe".
    tasks: most tasks that may be open at a time, each of which holds a slot. Default: one more than fit into a step.
    threshold: least probability of a task.
    refine: the running step is forecast anew at half of its layers (paper 6.1).
    """

    residency: Residency | None = None
    device_memory: str | int | None = None
    policy: Policy | str = "seqmoe"
    predictor: str | Path = "auto"
    transfers: Transfers | str = "auto"
    max_batch: int = 1
    context: int | None = None
    dtype: str | None = None
    kernels: Kernels | None = None
    decode_kernels: bool = True
    scheduler: Scheduler = "seqmoe"
    tasks: int | None = None
    threshold: float = THRESHOLD
    refine: bool = True

    def __post_init__(self) -> None:
        check_policy(self.policy)
        if self.transfers not in get_args(Transfers):
            expected = ", ".join(get_args(Transfers))
            raise ConfigError(f"unknown transfer engine {self.transfers!r}: expected one of {expected}")
        if self.residency is not None and self.device_memory is not None:
            raise ConfigError("give either a residency or a device memory, not both")


class EngineKeywords(TypedDict, total=False):
    """The fields of `EngineOptions` as keyword arguments, for signatures; a test holds the two together."""

    residency: Residency | None
    device_memory: str | int | None
    policy: Policy | str
    predictor: str | Path
    transfers: Transfers | str
    max_batch: int
    context: int | None
    dtype: str | None
    kernels: Kernels | None
    decode_kernels: bool
    scheduler: Scheduler
    tasks: int | None
    threshold: float
    refine: bool


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are drawn. `temperature=0` is greedy and ignores the rest.

    Filters apply in the order temperature, top-k (0 = off), top-p (1 = off), min-p (0 = off). The draw of a sequence
    depends on its `seed` and position alone, so it is the same at every residency, policy and place in a batch.
    """

    temperature: float | int = 0.0
    top_k: int = 0
    top_p: float | int = 1.0
    min_p: float | int = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            "temperature": (self.temperature, self.temperature >= 0, "0 (greedy) or positive"),
            "top_k": (self.top_k, self.top_k >= 0, "0 (off) or positive"),
            "top_p": (self.top_p, 0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (self.min_p, 0 <= self.min_p < 1, "in [0, 1)"),
            "seed": (self.seed, 0 <= self.seed < 2**32, "in [0, 2^32)"),
        }
        for name, (value, valid, expected) in checks.items():
            if not valid:
                raise ConfigError(f"{name} must be {expected}, got {value}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def override(self, **given: float | int | None) -> SamplingConfig:
        """The same with the options that are given, those that are not None. Raises `ConfigError`."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]

    def spread(self, count: int) -> list[SamplingConfig]:
        """For `count` sequences of one batch, which are to differ: sequence b draws with seed + b."""
        return [replace(self, seed=(self.seed + b) % 2**32) for b in range(count)]


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How text is generated. Faults in the options show before a model is loaded.

    max_new_tokens: of each prompt, at most.
    stop: texts before which a generation ends.
    sampling: what the next five replace single numbers of: "greedy", "model" (what the model's generation_config.json
        asks for), or a `SamplingConfig`.
    temperature: divides the logits; 0 is greedy.
    top_k: only the k most likely tokens are drawn; 0 is off.
    top_p: only the most likely tokens whose probabilities sum to p are drawn; 1 is off.
    min_p: only tokens at least p times as likely as the best one are drawn; 0 is off.
    seed: of the draws; prompt b of a batch draws with seed + b.
    chat_options: what the model's chat template takes besides the messages, such as `{"enable_thinking": False}`.
    """

    max_new_tokens: int = 128
    stop: Sequence[str] = ()
    sampling: SamplingConfig | Literal["greedy", "model"] | str = "greedy"
    temperature: float | int | None = None
    top_k: int | None = None
    top_p: float | int | None = None
    min_p: float | int | None = None
    seed: int | None = None
    chat_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise PromptError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise PromptError(f"stop must be a list of non-empty strings, got {self.stop!r}")
        if not isinstance(self.sampling, SamplingConfig) and self.sampling not in ("greedy", "model"):
            raise ConfigError(f"sampling must be 'greedy', 'model' or a SamplingConfig, got {self.sampling!r}")
        self.sampling_over(SamplingConfig())

    def sampling_over(self, model: SamplingConfig | ConfigError) -> SamplingConfig:
        """How tokens are drawn from a model whose makers sample it as `model` says. An error there is raised where
        that is asked for."""
        named = {"greedy": SamplingConfig(), "model": model}
        base = self.sampling if isinstance(self.sampling, SamplingConfig) else named[self.sampling]
        if isinstance(base, ConfigError):
            raise base
        return base.override(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, seed=self.seed
        )


class GenerateKeywords(TypedDict, total=False):
    """The fields of `GenerateOptions` as keyword arguments, for signatures; a test holds the two together."""

    max_new_tokens: int
    stop: Sequence[str]
    sampling: SamplingConfig | Literal["greedy", "model"] | str
    temperature: float | int | None
    top_k: int | None
    top_p: float | int | None
    min_p: float | int | None
    seed: int | None
    chat_options: Mapping[str, Any] | None


def meanings(options: type) -> dict[str, str]:
    """What the docstring of a class of options says of each field: for the help of commands and the docs."""
    text = inspect.getdoc(options) or ""
    found = re.findall(r"^(\w+): (.*(?:\n    .*)*)", text, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", meaning) for name, meaning in found}
