"""DeepSeek-V2 and V2-Lite, DeepSeek-V3 and R1, and GLM-4.7-Flash, which is built like V3: latent attention."""

from __future__ import annotations

from dataclasses import replace

from seqmoe_jax.errors import ConfigError
from seqmoe_jax.fields import Fields
from seqmoe_jax.models.families.common import (
    DEFAULTS,
    Family,
    check_groups,
    dense_mlp,
    layer_types,
    model,
    only,
    required,
    rms_norm,
    rope_group,
    router,
    shared_expert,
    sigmoid_router,
    whole_rope,
)
from seqmoe_jax.models.mixers.mla import MLA
from seqmoe_jax.models.naming import CORRECTION, FURTHER, IGNORED, LAYER, SHARED, Names
from seqmoe_jax.models.norms import RMSNorm
from seqmoe_jax.models.routers import Groups, RouterSpec
from seqmoe_jax.models.spec import LayerSpec, ModelSpec, MoESpec

LATENT_EPS = 1e-6  # of the latents' norms, whatever rms_norm_eps says


def deepseek_v2(config: Fields) -> ModelSpec:
    """Softmax router, perhaps over the best groups; weights are not normalised."""
    only(config, "scoring_func", "softmax")
    only(config, "norm_topk_prob", False)
    only(config, "mlp_bias", False)
    only(config, "rope_interleave", True)
    first = config.count("first_k_dense_replace")
    return _model(config, "deepseek_v2", _softmax_router(config), tuple(i >= first for i in _layers(config)))


def deepseek_v3(config: Fields) -> ModelSpec:
    """Sigmoid router with a correction for choosing, over the best groups."""
    only(config, "scoring_func", "sigmoid")
    first = config.count("first_k_dense_replace")
    return _model(config, "deepseek_v3", sigmoid_router(config), tuple(i >= first for i in _layers(config)))


def glm4_moe_lite(config: Fields) -> ModelSpec:
    """DeepSeek-V3 with its dense layers in a list; the first one where there is none."""
    default = tuple("sparse" if i else "dense" for i in _layers(config))
    kinds = layer_types(config, default, ("dense", "sparse"), name="mlp_layer_types")
    # Published files have both. The list is what counts, and a number that means something else is a fault.
    first = config.count("first_k_dense_replace", kinds.count("dense"))
    if kinds != tuple("dense" if i < first else "sparse" for i in _layers(config)) and first:
        raise ConfigError(
            f"{config.where}: first_k_dense_replace {first} and mlp_layer_types {list(kinds)} disagree; remove one"
        )
    return _model(config, "glm4_moe_lite", sigmoid_router(config), tuple(kind == "sparse" for kind in kinds))


def _layers(config: Fields) -> range:
    return range(config.size("num_hidden_layers"))


def _softmax_router(config: Fields) -> RouterSpec:
    method = config.text("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.unsupported("topk_method", method, ("greedy", "group_limited_greedy"))
    spec = router(
        config,
        *("n_routed_experts", "num_experts", "num_local_experts"),
        scale=config.number("routed_scaling_factor"),
        rounded=False,
    )
    if method == "greedy":
        return spec
    count, best = config.size("n_group"), config.size("topk_group")
    check_groups(config, spec, count, best)
    return replace(spec, groups=Groups(n_group=count, topk_group=best, score="max"))


def _model(config: Fields, family: str, router: RouterSpec, sparse: tuple[bool, ...]) -> ModelSpec:
    only(config, "hidden_act", "silu")
    only(config, "moe_layer_freq", 1)
    norm = rms_norm(config)
    moe = MoESpec(router=router, width=config.size("moe_intermediate_size"), shared=shared_expert(config))
    attention = _latent_attention(config)
    layers = tuple(
        LayerSpec(norm=norm, mixer=attention, mlp=moe if has_experts else dense_mlp(config)) for has_experts in sparse
    )
    return model(config, family=family, layers=layers, norm=norm)


def _latent_attention(config: Fields) -> MLA:
    only(config, "attention_bias", False)
    required(config, "q_lora_rank")
    nope, turning = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    positions = whole_rope(config, turning)
    scale = (nope + turning) ** -0.5
    if positions.yarn is not None:
        scale *= positions.yarn.mscale(rope_group(config).number("mscale_all_dim", 0.0)) ** 2
    return MLA(
        num_heads=config.size("num_attention_heads"),
        qk_nope_head_dim=nope,
        rope=replace(positions, layout="pairs" if config.flag("rope_interleave") else "half"),
        v_head_dim=config.size("v_head_dim"),
        kv_lora_rank=config.size("kv_lora_rank"),
        q_lora_rank=config.size("q_lora_rank", None),
        scale=scale,
        norm=RMSNorm(eps=LATENT_EPS),
    )


LATENT = {
    "mixer.q_a": "self_attn.q_a_proj.weight",
    "mixer.q_a_norm": "self_attn.q_a_layernorm.weight",
    "mixer.q_b": "self_attn.q_b_proj.weight",
    "mixer.kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "mixer.kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "mixer.kv_b": "self_attn.kv_b_proj.weight",
}
NAMES = Names(layer=LAYER | LATENT | CORRECTION | SHARED, ignored=IGNORED + FURTHER)
COMMON = {**DEFAULTS, "rope_interleave": True}
V2 = Family(
    spec=deepseek_v2,
    names=NAMES,
    defaults={
        **COMMON,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
    },
)
V3 = Family(
    spec=deepseek_v3,
    names=NAMES,
    defaults={
        **COMMON,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
    },
)
GLM4_LITE = Family(
    spec=glm4_moe_lite,
    names=NAMES,
    defaults={
        **COMMON,
        "rms_norm_eps": 1e-5,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "mlp_layer_types": None,
        "n_shared_experts": 1,
    },
)
