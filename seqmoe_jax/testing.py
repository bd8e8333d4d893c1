"""A model small enough for unit tests, yours and ours: random weights, every mechanism in use, compiled in seconds."""

from __future__ import annotations

from typing import Any, Unpack

from seqmoe_jax.api import Engine
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.forecast.trained import TrainedPredictor
from seqmoe_jax.loading import random_model
from seqmoe_jax.models.model import Model
from seqmoe_jax.options import EngineKeywords, EngineOptions
from seqmoe_jax.text import ByteTokenizer


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A Qwen3-MoE `config.json`: two MoE layers of 8 experts, 2 active, and a dense layer between them."""
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "rope_theta": 1e6,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
    }
    return config | changes


def tiny_model(*, seed: int = 0, **changes: Any) -> Model:
    """`tiny_config` with random weights, in memory."""
    return random_model(tiny_config(**changes), seed=seed, name="tiny")


def tiny_engine(*, seed: int = 0, **options: Unpack[EngineKeywords]) -> Engine:
    """An engine over `tiny_model` that reads and writes bytes. `options` are the fields of `EngineOptions`."""
    model = tiny_model(seed=seed)
    return Engine(TokenEngine(model, EngineOptions(**options)), ByteTokenizer(vocab=model.spec.vocab))


def untrained_predictor(model: Model) -> TrainedPredictor:
    """A small predictor of the model's L, E and K, whose weights were never trained: its forecasts are noise."""
    import jax.numpy as jnp
    from flax import nnx

    from seqmoe_jax.forecast.config import PredictorConfig
    from seqmoe_jax.forecast.predictor import Predictor

    spec = model.spec
    config = PredictorConfig(
        model=model.name, layers=len(spec.moe_layers), experts=spec.moe.num_experts, active=spec.moe.top_k,
        d_model=32, head_dim=16, d_state=8, blocks=1, echo=16, vocabulary=spec.vocab, token_rows=70, token_width=8,
        refine_width=16,
    )  # fmt: skip
    weights = Predictor(config, rngs=nnx.Rngs(0)).weights() | {"token_table": jnp.arange(spec.vocab) % 60}
    return TrainedPredictor(config=config, weights=weights, name="untrained")
