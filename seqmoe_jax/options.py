"""What users choose, said once: `load`, `generate`, every command, `serve`, `bench` and the docs share these classes.

Imports no JAX, so that the command line can say what there is to choose at once.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from seqmoe_jax.errors import ConfigError, PromptError, SeqMoEError

Policy = Literal["seqmoe", "lru", "lfu", "prefill-hot", "full"]  # what each of them evicts: `experts.policy`
Transfers = Literal["auto", "none", "device_put", "callback", "dma"]  # how each moves experts: `prefetch.engine`
Scheduler = Literal["seqmoe", "moe-infinity", "promoe"]  # what each moves next: `prefetch.schedule`
Kernels = Literal["xla", "gpu", "tpu"]  # `pallas_kernels.backend.Implementation`
Residency = float | int | Literal["least"]

MAX_BATCH = 8
LONGEST_CONTEXT = 2**24  # tokens; beyond what any model was made for
MOST_TASKS = 2**16
DTYPES = "float32", "bfloat16"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
THRESHOLD = 0.2  # least probability of a prefetch task; chosen in simulation (`simulation.settings`)


def check_policy(policy: str) -> Policy:
    """The policy named, or `ConfigError` with the names there are."""
    known: Policy = _one_of("policy", policy, get_args(Policy))
    return known


def _one_of(name: str, value: Any, names: Sequence[str]) -> Any:
    if not isinstance(value, str) or value not in names:
        raise ConfigError(f"unknown {name} {value!r}: expected one of {', '.join(names)}")
    return value


def _integer(name: str, value: Any, least: int, most: int, error: type[SeqMoEError] = ConfigError) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        raise error(f"{name} must be an integer from {least} to {most}, got {_type_or_short(value)}")


def _number(name: str, value: Any, valid: Callable[[Any], bool], expected: str) -> None:
    # NaN is in no range, and an integer beyond a float's is none of these numbers either.
    if isinstance(value, bool) or not isinstance(value, Real) or not valid(value):
        raise ConfigError(f"{name} must be {expected}, got {_type_or_short(value)}")


def _type_or_short(value: Any) -> str:
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(value) if abs(int(value)) < 10**20 else "an integer of many digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}... ({type(value).__name__})"


def parse_bytes(text: str | int) -> int:
    """The bytes that `"12GiB"`, `"800MB"` or `12_000_000_000` mean. Raises `ConfigError`."""
    size: float = -1.0
    if isinstance(text, Integral) and not isinstance(text, bool):
        size = float(text) if abs(text) < 2**63 else -1.0
    elif isinstance(text, str):
        match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?i?)b?\s*", text.lower())
        if match and match[2] in _UNITS:
            size = float(match[1]) * _UNITS[match[2]]
    if not 0 <= size < 2**63:
        raise ConfigError(f"cannot read {_type_or_short(text)} as a memory size; write it like 12GiB or 800MB")
    if size < 10**6:  # no model runs in that: a unit was forgotten
        raise ConfigError(f"a memory size of {text} is {int(size)} bytes; write the unit, like 12GiB or 800MB")
    return int(size)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a model is loaded and run. Every field has a default that works.

    residency: share of the experts that have a slot, in (0, 1], or "least": K per sequence. Default: as many as fit.
    device_memory: instead of a residency, a budget for weights, slots, keys and values and workspace: "12GiB" or bytes.
    policy: which expert leaves when a missing one needs its slot: "seqmoe" (what the forecast needs least), "lru",
        "lfu", "prefill-hot" (what the prompt used most stays) or "full" (what was resident after loading stays).
    predictor: what policy seqmoe forecasts by: "auto" (the one that `seqmoe learn` installed for this model or that
        ships for it, else the past alone), a directory that `seqmoe train-predictor` wrote, or "none".
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
        _one_of("transfer engine", self.transfers, get_args(Transfers))
        _one_of("scheduler", self.scheduler, get_args(Scheduler))
        if self.kernels is not None:
            _one_of("kernels", self.kernels, get_args(Kernels))
        if self.dtype is not None:
            _one_of("dtype", self.dtype, DTYPES)
        if self.residency is not None and self.residency != "least":
            _number("residency", self.residency, lambda x: 0 < x <= 1, "in (0, 1] or 'least'")
        if self.device_memory is not None:
            parse_bytes(self.device_memory)
        if not isinstance(self.predictor, str | Path) or not str(self.predictor):
            raise ConfigError(f"predictor must be 'auto', 'none' or a directory, got {_type_or_short(self.predictor)}")
        _integer("max_batch", self.max_batch, 1, MAX_BATCH)
        if self.context is not None:
            _integer("context", self.context, 1, LONGEST_CONTEXT)
        if self.tasks is not None:
            _integer("tasks", self.tasks, 1, MOST_TASKS)
        _number("threshold", self.threshold, lambda x: 0 <= x <= 1, "in [0, 1]")
        for name in ("decode_kernels", "refine"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {_type_or_short(getattr(self, name))}")
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
        _number("temperature", self.temperature, lambda x: 0 <= x <= sys.float_info.max, "0 (greedy) or positive")
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, lambda x: 0 < x <= 1, "in (0, 1]")
        _number("min_p", self.min_p, lambda x: 0 <= x < 1, "in [0, 1)")
        _integer("seed", self.seed, 0, 2**32 - 1)

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
        _integer("max_new_tokens", self.max_new_tokens, 1, LONGEST_CONTEXT, PromptError)
        texts = self.stop if isinstance(self.stop, Sequence) and not isinstance(self.stop, str | bytes) else [None]
        if not all(isinstance(text, str) and text for text in texts):
            raise PromptError(f"stop must be a list of non-empty strings, got {_type_or_short(self.stop)}")
        named = isinstance(self.sampling, str) and self.sampling in ("greedy", "model")
        if not named and not isinstance(self.sampling, SamplingConfig):
            raise ConfigError(
                f"sampling must be 'greedy', 'model' or a SamplingConfig, got {_type_or_short(self.sampling)}"
            )
        if self.chat_options is not None and not isinstance(self.chat_options, Mapping):
            raise PromptError(f"chat_options must map names to values, got {_type_or_short(self.chat_options)}")
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
