"""Qwen3-MoE (Qwen3-30B-A3B and relatives) and Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B)."""

from __future__ import annotations

from seqmoe_jax.fields import Fields
from seqmoe_jax.models.families.common import (
    DEFAULTS,
    Family,
    dense_mlp,
    gqa,
    model,
    only,
    rms_norm,
    router,
    sparse_layers,
)
from seqmoe_jax.models.mixers.gqa import GQA
from seqmoe_jax.models.mlp import DenseSpec, SharedSpec
from seqmoe_jax.models.naming import LAYER, Names
from seqmoe_jax.models.spec import LayerSpec, ModelSpec, MoESpec


def _moe(config: Fields, shared: SharedSpec | None) -> MoESpec:
    # Files saved by transformers 5 name the count num_local_experts.
    softmax = router(config, "num_experts", "num_local_experts", normalize=config.flag("norm_topk_prob"))
    return MoESpec(router=softmax, width=config.size("moe_intermediate_size"), shared=shared)


def _model(config: Fields, family: str, attention: GQA, moe: MoESpec) -> ModelSpec:
    only(config, "hidden_act", "silu")
    only(config, "use_sliding_window", False)
    norm = rms_norm(config)
    layers = tuple(
        LayerSpec(norm=norm, mixer=attention, mlp=moe if sparse else dense_mlp(config))
        for sparse in sparse_layers(config)
    )
    return model(config, family=family, layers=layers, norm=norm)


def qwen3_moe(config: Fields) -> ModelSpec:
    """Queries and keys normed by head, softmax router, no shared expert."""
    only(config, "attention_bias", False)
    return _model(config, "qwen3_moe", gqa(config, qk_norm="head"), _moe(config, None))


def qwen2_moe(config: Fields) -> ModelSpec:
    """Biases on queries, keys and values; a shared expert weighed by a sigmoid."""
    shared = SharedSpec(mlp=DenseSpec(width=config.size("shared_expert_intermediate_size")), gated=True)
    attention = gqa(config, qkv_bias=config.flag("qkv_bias"))
    return _model(config, "qwen2_moe", attention, _moe(config, shared))


SHARED = {
    **{f"shared.{name}": f"mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")},
    "shared.weight": "mlp.shared_expert_gate.weight",
}
COMMON = {**DEFAULTS, "head_dim": None, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None}
QWEN3 = Family(spec=qwen3_moe, names=Names(), defaults=COMMON)
QWEN2 = Family(spec=qwen2_moe, names=Names(layer=LAYER | SHARED), defaults={**COMMON, "qkv_bias": True})
