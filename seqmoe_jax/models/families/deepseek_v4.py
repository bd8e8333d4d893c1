"""DeepSeek-V4-Flash: streams of hidden states, attention over a window and a compressed past, hash-routed first layers.

The arithmetic is that of transformers (weights dequantised, no quantisation of activations or caches), with routing
weights kept in float32; the released inference code rounds caches and activations to 8 and 4 bits and so gives
other tokens now and then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pallas_kernels.layout import FP4, Activation
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.fields import Fields
from seqmoe_jax.models.families.common import (
    DEFAULTS,
    Family,
    layer_types,
    model,
    only,
    rms_norm,
    rope,
    rope_group,
    router,
)
from seqmoe_jax.models.mixers.compressed import CompressedAttention
from seqmoe_jax.models.mixers.compressor import Compressor, Indexer
from seqmoe_jax.models.mlp import DenseSpec, SharedSpec
from seqmoe_jax.models.naming import CORRECTION, LAYER, MODEL, SHARED, ExpertNames, Names
from seqmoe_jax.models.norms import RMSNorm
from seqmoe_jax.models.residual import HyperConnection, HyperHead
from seqmoe_jax.models.rope import Rope
from seqmoe_jax.models.spec import LayerSpec, ModelSpec, MoESpec

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
BY_RATIO = {0: SLIDING, 4: SPARSE, 128: HEAVY}  # how published files write the kinds of layers
HASHED, SCORED = "hash_moe", "moe"
KINDS_OF_ROPE = {"main", "compress"}


def deepseek_v4(config: Fields) -> ModelSpec:
    """Both the published form of the file and what transformers rewrites it to."""
    only(config, "hidden_act", "silu")
    only(config, "scoring_func", "sqrtsoftplus")
    only(config, "topk_method", "noaux_tc")
    only(config, "norm_topk_prob", True)
    only(config, "attention_bias", False)
    only(config, "mlp_bias", False)
    only(config, "n_shared_experts", 1)
    norm = rms_norm(config)
    streams, eps = config.size("hc_mult"), config.number("hc_eps")
    residual = HyperConnection(streams=streams, iterations=config.size("hc_sinkhorn_iters"), eps=eps, norm_eps=norm.eps)
    mixers = _attention(config, norm)
    layers = tuple(
        LayerSpec(norm=norm, mixer=mixers[kind], mlp=_moe(config, routing == HASHED), residual=residual)
        for kind, routing in zip(_kinds(config), _routing(config), strict=True)
    )
    head = HyperHead(streams=streams, eps=eps, norm_eps=norm.eps)
    return model(config, family="deepseek_v4", layers=layers, norm=norm, head=head, **_expert_dtype(config))


def _expert_dtype(config: Fields) -> dict[str, Any]:
    """Experts may be in FP4 where the rest is in FP8."""
    dtype = config.text("expert_dtype", "fp8")
    if dtype not in ("fp4", "fp8"):
        raise config.unsupported("expert_dtype", dtype, ("fp4", "fp8"))
    return (
        {"expert_dtype": FP4, "expert_scales": None}
        if dtype == "fp4" and config.group("quantization_config").values
        else {}
    )


def _kinds(config: Fields) -> tuple[str, ...]:
    """The attention of each layer, from `layer_types` or from the published `compress_ratios`."""
    layers, ratios = config.size("num_hidden_layers"), config.ints("compress_ratios", ())
    if not ratios or config.values.get("layer_types") is not None:
        return layer_types(config, (), tuple(BY_RATIO.values()))
    for ratio in ratios:
        if ratio not in BY_RATIO:
            raise config.unsupported("compress_ratios", ratio, tuple(BY_RATIO))
    if len(ratios) < layers:
        raise ConfigError(f"{config.where}: compress_ratios has {len(ratios)} entries for num_hidden_layers {layers}")
    return tuple(BY_RATIO[ratio] for ratio in ratios[:layers])  # what follows predicts further tokens


def _routing(config: Fields) -> tuple[str, ...]:
    layers, hashed = config.size("num_hidden_layers"), config.count("num_hash_layers")
    default = tuple(HASHED if i < hashed else SCORED for i in range(layers))
    return layer_types(config, default, (HASHED, SCORED), name="mlp_layer_types")


def _attention(config: Fields, norm: RMSNorm) -> dict[str, CompressedAttention]:
    """The three kinds. Layers that see a compressed past have rotary positions of their own, scaled by YaRN."""
    only(config, "num_key_value_heads", 1)
    head_dim, rank = config.size("head_dim"), config.size("q_lora_rank")
    main, compressed = _rope(config, "main", head_dim), _rope(config, "compress", head_dim)
    rates = config.group("compress_rates")
    csa = config.size("compress_rate_csa", rates.size(SPARSE, 4))
    hca = config.size("compress_rate_hca", rates.size(HEAVY, 128))

    def compressor(ratio: int, dim: int, overlap: bool) -> Compressor:
        return Compressor(compress_ratio=ratio, head_dim=dim, overlap=overlap, rope=compressed, norm=norm)

    def attention(positions: Rope, **past: Any) -> CompressedAttention:
        return CompressedAttention(
            num_heads=config.size("num_attention_heads"),
            head_dim=head_dim,
            q_lora_rank=rank,
            sliding_window=config.size("sliding_window"),
            rope=positions,
            norm=norm,
            o_groups=config.size("o_groups"),
            o_lora_rank=config.size("o_lora_rank"),
            **past,
        )

    indexer = Indexer(
        num_heads=config.size("index_n_heads"),
        top_k=config.size("index_topk"),
        compressor=compressor(csa, config.size("index_head_dim"), True),
        q_lora_rank=rank,
    )
    return {
        SLIDING: attention(main),
        SPARSE: attention(compressed, compressor=compressor(csa, head_dim, True), indexer=indexer),
        HEAVY: attention(compressed, compressor=compressor(hca, head_dim, False)),
    }


def _rope(config: Fields, kind: str, head_dim: int) -> Rope:
    """`rope_parameters.main` and `.compress`, or what published files say in their stead."""
    both = config.group("rope_parameters")
    context = {"max_position_embeddings": config.size("max_position_embeddings")}
    if both.values.keys() >= KINDS_OF_ROPE and not config.group("rope_scaling").values:
        part = both.group(kind)
        values = {**part.values, "partial_rotary_factor": part.number("partial_rotary_factor")}
    else:
        share = config.number("partial_rotary_factor", config.size("qk_rope_head_dim", head_dim // 8) / head_dim)
        values = {"partial_rotary_factor": share, "rope_theta": config.number("rope_theta")}
        if kind == "compress":
            # YaRN's factor for cosines and sines is not used unless it is spelled out.
            theta = config.number("compress_rope_theta")
            values = {"attention_factor": 1.0, **rope_group(config).values, **values, "rope_theta": theta}
    only(config.of(values, config.where), "truncate", True)  # transformers looks for it outside of both, and truncates
    found = rope(config.of({"rope_parameters": values, **context}, config.where), head_dim)
    return replace(found, layout="pairs", rotated="last")


def _moe(config: Fields, hashed: bool) -> MoESpec:
    activation, width = Activation(limit=config.number("swiglu_limit")), config.size("moe_intermediate_size")
    shared = DenseSpec(width=width, activation=activation)
    return MoESpec(
        router=router(
            config,
            *("n_routed_experts", "num_local_experts"),
            score="sqrt-softplus",
            correction_bias=not hashed,
            hashed=config.size("vocab_size") if hashed else None,
            normalize=True,
            eps=1e-20,
            scale=config.number("routed_scaling_factor"),
            rounded=False,
        ),
        width=width,
        activation=activation,
        shared=SharedSpec(mlp=shared, gated=False),
    )


def _compressor_names(ours: str, theirs: str) -> dict[str, str]:
    return {
        f"{ours}.kv": f"{theirs}.wkv.weight",
        f"{ours}.gate": f"{theirs}.wgate.weight",
        f"{ours}.ape": f"{theirs}.ape",
        f"{ours}.norm": f"{theirs}.norm.weight",
    }


def _hyper_names(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.map": f"{theirs}_fn", f"{ours}.base": f"{theirs}_base", f"{ours}.scale": f"{theirs}_scale"}


LAYERS = {
    "input_norm": "attn_norm.weight",
    "post_norm": "ffn_norm.weight",
    **_hyper_names("mixer_residual", "hc_attn"),
    **_hyper_names("mlp_residual", "hc_ffn"),
    **{f"mixer.{name}": f"attn.w{name}.weight" for name in ("q_a", "q_b", "kv", "o_a", "o_b")},
    "mixer.q_norm": "attn.q_norm.weight",
    "mixer.kv_norm": "attn.kv_norm.weight",
    "mixer.sinks": "attn.attn_sink",
    **_compressor_names("mixer.compressor", "attn.compressor"),
    "mixer.indexer.q_b": "attn.indexer.wq_b.weight",
    "mixer.indexer.weights_proj": "attn.indexer.weights_proj.weight",
    **_compressor_names("mixer.indexer.compressor", "attn.indexer.compressor"),
    "router.weight": "ffn.gate.weight",
    "router.correction_bias": "ffn.gate.bias",
    "router.table": "ffn.gate.tid2eid",
    "shared.gate": "ffn.shared_experts.w1.weight",
    "shared.up": "ffn.shared_experts.w3.weight",
    "shared.down": "ffn.shared_experts.w2.weight",
}
EXPERTS = ExpertNames(
    gate="ffn.experts.{expert}.w1.weight", up="ffn.experts.{expert}.w3.weight", down="ffn.experts.{expert}.w2.weight"
)
PUBLISHED = Names(
    model={"embed": "embed.weight", "final_norm": "norm.weight", "lm_head": "head.weight"}
    | _hyper_names("head", "hc_head"),
    prefix="layers.{index}.",
    layer=LAYERS,
    experts=EXPERTS,
)
# As transformers saves a model: names half its own, half the published ones.
SAVED = replace(
    PUBLISHED,
    model=MODEL | {"lm_head": "head.weight"} | _hyper_names("head", "{root}hc_head.hc"),
    prefix="{root}layers.{index}.",
    layer=LAYERS | {"mixer.kv_norm": "attn.norm.weight"},
)
SAVED_WITHOUT_HEAD = replace(PUBLISHED, layer=SAVED.layer)


def _own_compressor(ours: str, theirs: str) -> dict[str, str]:
    return {
        f"{ours}.kv": f"{theirs}.kv_proj.weight",
        f"{ours}.gate": f"{theirs}.gate_proj.weight",
        f"{ours}.ape": f"{theirs}.position_bias",
        f"{ours}.norm": f"{theirs}.kv_norm.weight",
    }


def _own_hyper(ours: str, theirs: str) -> dict[str, str]:
    return {
        f"{ours}.{part}": f"{theirs}.{name}" for part, name in (("map", "fn"), ("base", "base"), ("scale", "scale"))
    }


INDEXER = "self_attn.compressor.indexer"
# All names those of transformers' classes, as it saves them where it is told to leave the published ones.
OWN = Names(
    model=MODEL | _hyper_names("head", "{root}hc_head.hc"),
    layer=LAYER
    | CORRECTION
    | SHARED
    | _own_hyper("mixer_residual", "attn_hc")
    | _own_hyper("mlp_residual", "ffn_hc")
    | {f"mixer.{name}": f"self_attn.{name}_proj.weight" for name in ("q_a", "q_b", "kv", "o_a", "o_b")}
    | {"mixer.q_norm": "self_attn.q_a_norm.weight", "mixer.kv_norm": "self_attn.kv_norm.weight"}
    | _own_compressor("mixer.compressor", "self_attn.compressor")
    | _own_compressor("mixer.indexer.compressor", INDEXER)
    | {"mixer.indexer.q_b": f"{INDEXER}.q_b_proj.weight", "router.table": "mlp.gate.tid2eid"}
    | {"mixer.indexer.weights_proj": f"{INDEXER}.scorer.weights_proj.weight"},
)
FAMILY = Family(
    spec=deepseek_v4,
    names=PUBLISHED,
    dialects=(SAVED, SAVED_WITHOUT_HEAD, OWN),
    defaults={
        **DEFAULTS,
        "compress_rates": {},
        "compress_rope_theta": 160000.0,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "num_hash_layers": 3,
        "mlp_layer_types": None,
        "sliding_window": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "swiglu_limit": 10.0,
        "routed_scaling_factor": 1.5,
    },
)
