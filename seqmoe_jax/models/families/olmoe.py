"""OLMoE (1B-7B)."""

from __future__ import annotations

from seqmoe_jax.fields import Fields
from seqmoe_jax.models.families.common import DEFAULTS, Family, gqa, model, only, rms_norm, router
from seqmoe_jax.models.naming import Names
from seqmoe_jax.models.spec import LayerSpec, ModelSpec, MoESpec


def olmoe(config: Fields) -> ModelSpec:
    """Queries and keys normed over their full width, and perhaps clipped."""
    only(config, "hidden_act", "silu")
    only(config, "attention_bias", False)
    norm = rms_norm(config)
    clip = config.number("clip_qkv", None)
    attention = gqa(config, norm=norm, qk_norm="full", clip_qkv=clip)
    softmax = router(config, "num_experts", "num_local_experts", normalize=config.flag("norm_topk_prob"))
    moe = MoESpec(router=softmax, width=config.size("intermediate_size"))
    layer = LayerSpec(norm=norm, mixer=attention, mlp=moe)
    return model(config, family="olmoe", layers=(layer,) * config.size("num_hidden_layers"), norm=norm)


FAMILY = Family(
    spec=olmoe,
    names=Names(),
    defaults={
        **DEFAULTS,
        "rms_norm_eps": 1e-5,
        "norm_topk_prob": False,
        "num_key_value_heads": None,
        "head_dim": None,
    },
)
