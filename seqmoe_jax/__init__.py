"""Mixture-of-Experts inference with most experts outside device memory, exactly.

The public names; each is imported when it is first used, so that `import seqmoe_jax` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqmoe_jax.api import Engine, Generation, generate, load
    from seqmoe_jax.errors import CheckpointError, ConfigError, PromptError, ResidencyError, SeqMoEError
    from seqmoe_jax.options import SamplingConfig
    from seqmoe_jax.stats import Stats

_WHERE = {
    "Engine": "api",
    "Generation": "api",
    "generate": "api",
    "load": "api",
    "Stats": "stats",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "PromptError": "errors",
    "ResidencyError": "errors",
    "SeqMoEError": "errors",
    "SamplingConfig": "sampling",
}

__all__ = [
    "CheckpointError", "ConfigError", "Engine", "Generation", "PromptError", "ResidencyError", "SamplingConfig",
    "SeqMoEError", "Stats", "generate", "load",
]  # fmt: skip
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
