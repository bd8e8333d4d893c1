"""`from_nnx`: a model of a Flax zoo as an engine that offloads its experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import jax
from flax import nnx

from seqmoe_jax.api import Engine
from seqmoe_jax.compilation import enable_compilation_cache
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.errors import ConfigError, ResidencyError
from seqmoe_jax.forecast.store import choose_predictor
from seqmoe_jax.host_memory import host_memory
from seqmoe_jax.loading import find_and_load_predictor
from seqmoe_jax.memory.fit import free_bytes, pool_bytes
from seqmoe_jax.memory.plan import DEFAULT_CONTEXT, plan_memory
from seqmoe_jax.options import EngineKeywords, EngineOptions, parse_bytes
from seqmoe_jax.progress import ProgressBar, say, shows_progress
from seqmoe_jax.text import TokenIds, Tokenizer, tokenizer_of
from seqmoe_jax.zoo.layouts import Paths, Zoo
from seqmoe_jax.zoo.load import NNXModel


def from_nnx(
    model: nnx.Module,
    layout: Zoo | str | Mapping[str, Paths] = "tunix",
    *,
    config: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | str | Path | Any | None = None,
    eos_token_ids: Sequence[int] = (),
    name: str | None = None,
    release: bool = True,
    progress: bool | None = None,
    **options: Unpack[EngineKeywords],
) -> Engine:
    """A Mixture-of-Experts language model in Flax NNX as an `Engine`: dense weights and a slot cache on the device, all
    experts in pinned host memory.

    **The module is consumed.** Its arrays go layer by layer into the engine, so that there is never more in memory than
    the model and one of its layers; what is left holds shapes, as after `nnx.eval_shape`. Its arrays may lie anywhere:
    a model that is larger than the device is made on the host (`jax.default_device`), or has NumPy arrays.
    Nothing has been taken where an error says what does not fit.

    Args:
      model: a module whose experts are stacked, `[E, D, F]` and `[E, F, D]`, float32, bfloat16 or float16.
      layout: the zoo whose names it has, "tunix", "easydel" or "bonsai"; or a mapping from our names of tensors to
        paths in the module (`seqmoe_jax.zoo.layouts`).
      config: fields of a `config.json` that count more than the module's configuration, or say what that leaves out:
        `{"model_type": "mixtral"}` names the family.
      tokenizer: a directory or Hugging Face id with one, or an object with `encode` and `decode`. Without: prompts are
        token ids, and generations have `tokens` but no text.
      eos_token_ids: tokens that end a generation.
      name: what predictors know the model by, `"Qwen/Qwen3-30B-A3B"` for one. Default: the name of its class.
      release: False leaves the module as it is. Then the model is in memory twice.
      progress: as in `load`.
      options: the fields of `EngineOptions`. `dtype` is by default that of the module.

    Raises `CheckpointError` with the module's own paths for arrays that are missing, too many, or of a wrong shape;
    `ConfigError`, `PredictorError` or `ResidencyError` as `load` does.
    """
    chosen = EngineOptions(**options)
    enable_compilation_cache()
    device = jax.devices()[0]
    found = NNXModel(model, layout, config or {}, name=name, release=release)
    spec, dtype = found.spec, found.dtype_here(chosen.dtype, device)
    text = TokenIds(vocab=spec.vocab) if tokenizer is None else tokenizer_of(tokenizer, spec.family, vocab=spec.vocab)
    if not all(isinstance(token, int) and 0 <= token < spec.vocab for token in eos_token_ids):
        raise ConfigError(f"eos_token_ids must be token ids below {spec.vocab}, got {list(eos_token_ids)}")
    if chosen.policy == "seqmoe":
        choose_predictor(
            chosen.predictor, found.name, layers=len(spec.moe_layers), experts=spec.moe.num_experts,
            active=spec.moe.top_k,
        )  # fmt: skip
    _check_fits(found, chosen, dtype, device)
    shown = shows_progress(progress)
    with ProgressBar(shown, f"loading {found.name}") as bar:
        loaded = found.load(dtype, device, bar)
    engine = TokenEngine(
        loaded,
        chosen,
        predictor=find_and_load_predictor(chosen.predictor, loaded) if chosen.policy == "seqmoe" else None,
        vocab=text.vocab,
        announce=say if shown else None,
    )
    return Engine(engine, text, eos_token_ids)


def _check_fits(found: NNXModel, options: EngineOptions, dtype: Any, device: jax.Device) -> None:
    """Raises `ResidencyError` where host or device cannot hold the model. What will be released counts as free."""
    spec = found.spec
    given_back = found.arrays.nbytes if found.release else lambda platform: 0
    needed = max(pool_bytes(spec) - given_back("cpu"), 0)
    if reason := host_memory().lacks(needed, "the experts"):
        raise ResidencyError(f"{reason}; take a smaller model, or a machine with more memory")
    free = free_bytes(device)
    plan_memory(
        spec,
        residency=options.residency,
        device_memory=None if options.device_memory is None else parse_bytes(options.device_memory),
        available=None if free is None else free + given_back(device.platform),
        batch=options.max_batch,
        context=min(options.context or DEFAULT_CONTEXT, spec.context),
        activation_dtype=dtype,
    )
