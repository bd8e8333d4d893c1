"""GPT-OSS (20B, 120B)."""

from __future__ import annotations

from dataclasses import replace

from pallas_kernels.layout import Activation
from seqmoe_jax.fields import Fields
from seqmoe_jax.models.families.common import DEFAULTS, Family, gqa, layer_types, model, only, rms_norm, router
from seqmoe_jax.models.naming import LAYER, ExpertNames, Names
from seqmoe_jax.models.spec import LayerSpec, ModelSpec, MoESpec

KINDS = ("sliding_attention", "full_attention")
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
LIMIT = 7.0  # of what goes into an expert's activation; transformers knows no other


def gpt_oss(config: Fields) -> ModelSpec:
    """Biases everywhere, attention sinks, every other layer with a sliding window, YaRN, clamped experts."""
    only(config, "hidden_act", "silu")
    only(config, "attention_bias", True)
    only(config, "swiglu_limit", LIMIT)
    if config.values.get("rope_parameters") is None:
        config = config.of({**config.values, "rope_parameters": YARN}, config.where)
    norm = rms_norm(config, rounding="late")
    full = gqa(config, norm=norm, qkv_bias=True, o_bias=True, sinks=True)
    sliding = replace(full, sliding_window=config.size("sliding_window"))
    mixers = {"full_attention": full, "sliding_attention": sliding}
    moe = MoESpec(
        router=router(config, "num_local_experts", "num_experts", score="chosen-softmax", bias=True),
        width=config.size("intermediate_size"),
        activation=Activation(limit=LIMIT, slope=1.702, shift=1.0),
        bias=True,
    )
    default = tuple(KINDS[i % 2] for i in range(config.size("num_hidden_layers")))
    layers = tuple(LayerSpec(norm=norm, mixer=mixers[kind], mlp=moe) for kind in layer_types(config, default, KINDS))
    return model(config, family="gpt_oss", layers=layers, norm=norm)


ROUTER = {"router.weight": "mlp.router.weight", "router.bias": "mlp.router.bias"}
FAMILY = Family(
    spec=gpt_oss,
    names=Names(layer=LAYER | ROUTER, experts=ExpertNames(split=False, interleaved=True, transposed=True)),
    defaults={
        **DEFAULTS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": None,
    },
)
