"""Qwen3-Next, and Qwen3.5 and 3.6 MoE: three layers of four are gated delta nets, the fourth gated attention."""

from __future__ import annotations

from seqmoe_jax.fields import Fields
from seqmoe_jax.models.families.common import (
    DEFAULTS,
    Family,
    dense_mlp,
    gqa,
    layer_types,
    model,
    only,
    rms_norm,
    router,
    sparse_layers,
)
from seqmoe_jax.models.families.qwen_moe import SHARED
from seqmoe_jax.models.mixers import Mixer
from seqmoe_jax.models.mixers.gated_delta_net import GatedDeltaNet
from seqmoe_jax.models.mlp import DenseSpec, SharedSpec
from seqmoe_jax.models.naming import LAYER, Names
from seqmoe_jax.models.spec import LayerSpec, ModelSpec, MoESpec

LINEAR, FULL = "linear_attention", "full_attention"


def qwen3_next(config: Fields) -> ModelSpec:
    """Projections of the delta net lie by key head; a layer may be dense."""
    return _model(
        config,
        "qwen3_next",
        grouped=True,
        normalize=config.flag("norm_topk_prob"),
        sparse=sparse_layers(config),
    )


def qwen3_5_moe(config: Fields) -> ModelSpec:
    """Weights of experts are always normalised."""
    layers = config.size("num_hidden_layers")
    return _model(config, "qwen3_5_moe", grouped=False, normalize=True, sparse=(True,) * layers)


def text_part(config: Fields) -> Fields:
    """The text part of a model that may have a vision tower.

    Of what concerns all parts, the text part's own word counts, but that either says that head and embedding are tied
    is enough: transformers has a class that goes by the one and a class that goes by the other, and a head of its
    own in the files counts more than both.
    """
    text = config.group("text_config")
    if not text.values:
        return config
    outer = {name: config.values[name] for name in ("quantization_config", "dtype", "torch_dtype")
             if name in config.values}  # fmt: skip
    tied = any(part.flag("tie_word_embeddings", False) for part in (config, text))
    return config.of(outer | dict(text.values) | {"tie_word_embeddings": tied}, text.where)


def _model(config: Fields, family: str, *, grouped: bool, normalize: bool, sparse: tuple[bool, ...]) -> ModelSpec:
    only(config, "hidden_act", "silu")
    only(config, "attention_bias", False)
    norm = rms_norm(config, zero_centered=True)
    mixers: dict[str, Mixer] = {
        LINEAR: _delta_net(config, grouped),
        FULL: gqa(config, partial=True, norm=norm, qk_norm="head", output_gate=True),
    }
    moe = MoESpec(
        router=router(config, "num_experts", "num_local_experts", normalize=normalize),
        width=config.size("moe_intermediate_size"),
        shared=SharedSpec(mlp=DenseSpec(width=config.size("shared_expert_intermediate_size")), gated=True),
    )
    interval, count = config.size("full_attention_interval"), config.size("num_hidden_layers")
    default = tuple(LINEAR if (i + 1) % interval else FULL for i in range(count))
    layers = tuple(
        LayerSpec(norm=norm, mixer=mixers[kind], mlp=moe if has_experts else dense_mlp(config))
        for kind, has_experts in zip(layer_types(config, default, tuple(mixers)), sparse, strict=True)
    )
    return model(config, family=family, layers=layers, norm=norm)


def _delta_net(config: Fields, grouped: bool) -> GatedDeltaNet:
    num_k_heads, num_v_heads = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    if num_v_heads % num_k_heads:
        raise config.unsupported("linear_num_value_heads", num_v_heads, (f"a multiple of {num_k_heads} key heads",))
    return GatedDeltaNet(
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        head_k_dim=config.size("linear_key_head_dim"),
        head_v_dim=config.size("linear_value_head_dim"),
        conv_kernel_size=config.size("linear_conv_kernel_dim"),
        norm=rms_norm(config),
        grouped=grouped,
    )


DELTA_NET = {
    **{f"mixer.{name}": f"linear_attn.in_proj_{name}.weight" for name in ("qkvz", "ba", "qkv", "z", "a", "b")},
    "mixer.conv": "linear_attn.conv1d.weight",
    "mixer.A_log": "linear_attn.A_log",
    "mixer.dt_bias": "linear_attn.dt_bias",
    "mixer.norm": "linear_attn.norm.weight",
    "mixer.out": "linear_attn.out_proj.weight",
}
LAYERS = LAYER | SHARED | DELTA_NET
COMMON = {
    **DEFAULTS,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "layer_types": None,
}
NEXT = Family(
    spec=qwen3_next,
    names=Names(layer=LAYERS),
    defaults={**COMMON, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": None},
)
QWEN3_5 = Family(spec=qwen3_5_moe, names=Names(layer=LAYERS), text=text_part, defaults=COMMON)
