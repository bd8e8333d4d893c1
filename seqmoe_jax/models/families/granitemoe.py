"""Granite-MoE (Granite 3.0 and 3.1 1B-A400M, 3B-A800M)."""

from __future__ import annotations

from seqmoe_jax.fields import Fields
from seqmoe_jax.models.families.common import DEFAULTS, Family, gqa, model, only, rms_norm, router
from seqmoe_jax.models.naming import LAYER, ExpertNames, Names
from seqmoe_jax.models.residual import Add
from seqmoe_jax.models.spec import LayerSpec, ModelSpec, MoESpec


def granitemoe(config: Fields) -> ModelSpec:
    """A constant multiplies embeddings, one the residual branches, one the attention scores; one divides the logits."""
    only(config, "hidden_act", "silu")
    only(config, "attention_bias", False)
    norm = rms_norm(config)
    attention = gqa(config, norm=norm, scale=config.number("attention_multiplier"))
    softmax = router(config, "num_local_experts", "num_experts", score="chosen-softmax")
    moe = MoESpec(router=softmax, width=config.size("intermediate_size"))
    layer = LayerSpec(norm=norm, mixer=attention, mlp=moe, residual=Add(scale=config.number("residual_multiplier")))
    return model(
        config,
        family="granitemoe",
        layers=(layer,) * config.size("num_hidden_layers"),
        norm=norm,
        embedding_scale=config.number("embedding_multiplier"),
        logits_scale=config.number("logits_scaling"),
    )


MULTIPLIERS = ("attention_multiplier", "residual_multiplier", "embedding_multiplier", "logits_scaling")


def _names(router: str, gate_up: str, down: str) -> Names:
    at = "block_sparse_moe."
    experts = ExpertNames(split=False, fused_gate_up=at + gate_up, fused_down=at + down)
    return Names(layer=LAYER | {"router.weight": at + router}, experts=experts)


FAMILY = Family(
    spec=granitemoe,
    names=_names("router.layer.weight", "input_linear.weight", "output_linear.weight"),
    dialects=(_names("router.weight", "experts.gate_up_proj", "experts.down_proj"),),  # transformers' own
    defaults={
        **DEFAULTS,
        **dict.fromkeys(MULTIPLIERS, 1.0),
        "num_key_value_heads": None,
        "head_dim": None,
    },
)
