"""Mixture-of-Experts inference with most experts outside device memory, exactly.

The public names; each is imported when it is first used, so that `import seqmoe_jax` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqmoe_jax import nnx, plots
    from seqmoe_jax.api import Engine, Generation, Routing, generate, load
    from seqmoe_jax.errors import (
        CheckpointError,
        ConfigError,
        EngineError,
        NonFiniteError,
        OutputError,
        PredictorError,
        ProfileError,
        PromptError,
        ResidencyError,
        SeqMoEError,
        ServerError,
        TraceError,
    )
    from seqmoe_jax.options import EngineOptions, GenerateOptions, SamplingConfig
    from seqmoe_jax.research.plan import Plan, plan
    from seqmoe_jax.research.predictors import Evaluation, Training, evaluate, train_predictor
    from seqmoe_jax.research.simulation import simulate
    from seqmoe_jax.simulation.simulator import SimulationResult
    from seqmoe_jax.stats import Stats
    from seqmoe_jax.traces.format import Trace
    from seqmoe_jax.zoo.engine import from_nnx

_NAMES = {
    "api": ("Engine", "Generation", "Routing", "generate", "load"),
    "errors": (
        "CheckpointError", "ConfigError", "EngineError", "NonFiniteError", "OutputError", "PredictorError",
        "ProfileError", "PromptError", "ResidencyError", "SeqMoEError", "ServerError", "TraceError",
    ),
    "options": ("EngineOptions", "GenerateOptions", "SamplingConfig"),
    "research.plan": ("Plan", "plan"),
    "research.predictors": ("Evaluation", "Training", "evaluate", "train_predictor"),
    "research.simulation": ("simulate",),
    "simulation.simulator": ("SimulationResult",),
    "stats": ("Stats",),
    "traces.format": ("Trace",),
    "zoo.engine": ("from_nnx",),
}  # fmt: skip
_MODULES = ("nnx", "plots")
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "CheckpointError", "ConfigError", "Engine", "EngineError", "EngineOptions", "Evaluation", "GenerateOptions",
    "Generation", "NonFiniteError", "OutputError", "Plan", "PredictorError", "ProfileError", "PromptError",
    "ResidencyError", "Routing", "SamplingConfig", "SeqMoEError", "ServerError", "SimulationResult", "Stats", "Trace",
    "TraceError", "Training", "evaluate", "from_nnx", "generate", "load", "nnx", "plan", "plots", "simulate",
    "train_predictor",
]  # fmt: skip
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
