"""Mixtral (8x7B, 8x22B)."""

from __future__ import annotations

from seqmoe_jax.fields import Fields
from seqmoe_jax.models.families.common import DEFAULTS, Family, gqa, model, only, rms_norm, router
from seqmoe_jax.models.naming import LAYER, ExpertNames, Names
from seqmoe_jax.models.spec import LayerSpec, ModelSpec, MoESpec


def mixtral(config: Fields) -> ModelSpec:
    """Plain attention; router weights are normalised and stay float32."""
    only(config, "hidden_act", "silu")
    norm = rms_norm(config)
    attention = gqa(config, norm=norm, sliding_window=config.size("sliding_window", None))
    softmax = router(config, "num_local_experts", "num_experts", normalize=True, rounded=False)
    moe = MoESpec(router=softmax, width=config.size("intermediate_size"))
    layer = LayerSpec(norm=norm, mixer=attention, mlp=moe)
    return model(config, family="mixtral", layers=(layer,) * config.size("num_hidden_layers"), norm=norm)


EXPERTS = ExpertNames(
    gate="block_sparse_moe.experts.{expert}.w1.weight",
    up="block_sparse_moe.experts.{expert}.w3.weight",
    down="block_sparse_moe.experts.{expert}.w2.weight",
)
FAMILY = Family(
    spec=mixtral,
    names=Names(layer=LAYER | {"router.weight": "block_sparse_moe.gate.weight"}, experts=EXPERTS),
    dialects=(Names(),),  # transformers' own
    defaults={**DEFAULTS, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "head_dim": None},
)
