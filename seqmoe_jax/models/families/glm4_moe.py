"""GLM-4.5, GLM-4.6 and GLM-4.5-Air."""

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
    shared_expert,
    sigmoid_router,
)
from seqmoe_jax.models.naming import CORRECTION, FURTHER, IGNORED, LAYER, SHARED, Names
from seqmoe_jax.models.spec import LayerSpec, ModelSpec, MoESpec


def glm4_moe(config: Fields) -> ModelSpec:
    """Half of each head turns; router and shared expert are DeepSeek-V3's; the first layers are dense."""
    only(config, "hidden_act", "silu")
    norm = rms_norm(config)
    attention = gqa(
        config,
        partial=True,
        norm=norm,
        qkv_bias=config.flag("attention_bias"),
        qk_norm="head" if config.flag("use_qk_norm") else None,
    )
    moe = MoESpec(
        router=sigmoid_router(config),
        width=config.size("moe_intermediate_size"),
        shared=shared_expert(config),
    )
    first = config.count("first_k_dense_replace")
    layers = tuple(
        LayerSpec(norm=norm, mixer=attention, mlp=dense_mlp(config) if i < first else moe)
        for i in range(config.size("num_hidden_layers"))
    )
    return model(config, family="glm4_moe", layers=layers, norm=norm)


FAMILY = Family(
    spec=glm4_moe,
    names=Names(layer=LAYER | CORRECTION | SHARED, ignored=IGNORED + FURTHER),
    defaults={
        **DEFAULTS,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "head_dim": None,
        "use_qk_norm": False,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
)
