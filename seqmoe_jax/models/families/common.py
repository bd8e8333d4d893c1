"""What the `config.json` files of most families say in the same words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from pallas_kernels.layout import FP4, FP4_BLOCK, FP8, ScaleKind
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.fields import Fields
from seqmoe_jax.models.mixers.gqa import GQA
from seqmoe_jax.models.mlp import DenseSpec, SharedSpec
from seqmoe_jax.models.naming import Names
from seqmoe_jax.models.norms import RMSNorm
from seqmoe_jax.models.quantization import Quantization, read_quantization
from seqmoe_jax.models.rope import Rope, Yarn
from seqmoe_jax.models.routers import Groups, RouterSpec
from seqmoe_jax.models.spec import LayerSpec, ModelSpec

FLOATS = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


# What transformers takes where a file is silent, and most of its configuration classes agree. Sizes are not among
# them: files give them. None: the field may be absent, and then follows from others.
DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a `config.json` becomes a `ModelSpec`, and what the checkpoint's tensors are called.

    `defaults` are those of this model type in transformers: what the file leaves out. `text` finds the part of the
    file that describes the decoder.
    """

    spec: Callable[[Fields], ModelSpec]
    names: Names
    defaults: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)
    dialects: tuple[Names, ...] = ()  # other names that checkpoints of this family go by
    text: Callable[[Fields], Fields] = lambda config: config

    def read(self, config: Fields) -> ModelSpec:
        """The spec that a file means, with the family's defaults. Raises `ConfigError`."""
        config = self.text(config)
        return self.spec(config.of({**self.defaults, **config.values}, config.where))

    def left_out(self, config: Fields) -> tuple[str, ...]:
        """Which of the family's defaults stand for what the file does not say, as far as they can decide which tensors
        there are."""
        of_all = DEFAULTS.keys() - {"attention_bias", "tie_word_embeddings"}  # the others change no tensor
        return tuple(self.defaults.keys() - of_all - self.text(config).values.keys())


def only(config: Fields, name: str, value: Any) -> None:
    """Raises `ConfigError` unless the field has the one value that is supported, or is absent."""
    found = config.values.get(name)
    if found is not None and (found != value or isinstance(found, bool) != isinstance(value, bool)):
        raise config.unsupported(name, found, (value,))


def required(config: Fields, *names: str) -> None:
    """Raises `ConfigError` unless the file has these fields, be it as null."""
    for name in names:
        if name not in config.values:
            raise ConfigError(f"{config.where}: field {name!r} is missing; add it as the model's makers trained it")


def rms_norm(config: Fields, **options: Any) -> RMSNorm:
    return RMSNorm(eps=config.number("rms_norm_eps"), **options)


def rope_group(config: Fields) -> Fields:
    """What the file says of rotary positions: `rope_scaling` of older files where it says anything (transformers lets
    it replace the other), else `rope_parameters`."""
    older = config.group("rope_scaling")
    group = older if older.values else config.group("rope_parameters")
    for name, value in group.values.items():
        if isinstance(value, dict):
            raise ConfigError(f"{group.where}: positions of a layer type's own ({name!r}) are not supported")
    return group


def rope(config: Fields, head_dim: int) -> Rope:
    """Rotary positions from `rope_parameters` of newer files, or `rope_theta` and `rope_scaling` of older ones.

    `partial_rotary_factor` is the share of a head that is rotated.
    """
    group = rope_group(config)
    kind = group.text("rope_type", group.text("type", "default"))
    theta = group.number("rope_theta") if "rope_theta" in group.values else config.number("rope_theta")
    share = group.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * share)
    if theta <= 1 or not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ConfigError(
            f"{config.where}: rope_theta {theta} must exceed 1 and partial_rotary_factor {share} give an even number "
            f"of at most {head_dim} dimensions, got {rotary_dim}"
        )
    if kind == "default":
        return Rope(theta=theta, rotary_dim=rotary_dim)
    if kind != "yarn":
        raise group.unsupported("rope_type", kind, ("default", "yarn"))
    yarn = Yarn(
        factor=group.number("factor"),
        original_max_position_embeddings=config.size(
            "original_max_position_embeddings",
            group.size("original_max_position_embeddings", config.size("max_position_embeddings")),
        ),
        beta_fast=group.number("beta_fast", 32.0),
        beta_slow=group.number("beta_slow", 1.0),
        truncate=group.flag("truncate", True),
    )
    if yarn.factor < 1 or yarn.beta_slow <= 0 or yarn.beta_fast <= yarn.beta_slow:
        raise ConfigError(f"{group.where}: expected factor >= 1 and beta_fast > beta_slow > 0, got {group.values}")
    # DeepSeek gives a weight for cosines and sines, and one for the scores, by which it is divided.
    weight, score_weight = group.number("mscale", 0.0), group.number("mscale_all_dim", 0.0)
    factor = yarn.mscale(weight) / yarn.mscale(score_weight) if weight and score_weight else yarn.mscale()
    factor = group.number("attention_factor", factor)
    return Rope(theta=theta, rotary_dim=rotary_dim, yarn=yarn, attention_factor=factor)


def whole_rope(config: Fields, head_dim: int) -> Rope:
    """Rotary positions of a family that rotates all of a head. Raises `ConfigError` where the file wants a part."""
    positions = rope(config, head_dim)
    if positions.rotary_dim != head_dim:
        raise ConfigError(f"{config.where}: partial_rotary_factor must be 1 for this model type; remove it")
    return positions


def gqa(config: Fields, *, partial: bool = False, **options: Any) -> GQA:
    """Grouped-query attention of the usual fields; `options` are fields of `GQA`. `partial`: the family knows heads of
    which only a part is rotated."""
    required(config, "num_key_value_heads", "head_dim")
    num_heads = config.size("num_attention_heads")
    num_kv_heads = config.size("num_key_value_heads", num_heads)
    head_dim = config.size("head_dim", max(1, config.size("hidden_size") // num_heads))
    if num_heads % num_kv_heads or head_dim % 2:
        raise ConfigError(
            f"{config.where}: num_attention_heads {num_heads} must be a multiple of num_key_value_heads {num_kv_heads} "
            f"and head_dim {head_dim} even"
        )
    positions = rope(config, head_dim) if partial else whole_rope(config, head_dim)
    return GQA(
        **dict(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=positions,
            scale=head_dim**-0.5,
            norm=rms_norm(config),
        )
        | options
    )


def router(config: Fields, *names: str, **options: Any) -> RouterSpec:
    """A router of the usual fields. `names` are those that files give the number of experts, `options` fields of
    `RouterSpec`."""
    experts, top_k = config.size(names[0], aliases=names[1:]), config.size("num_experts_per_tok")
    given = {name: config.values[name] for name in names if config.values.get(name) is not None}
    if len(set(given.values())) > 1:
        raise ConfigError(f"{config.where}: {' and '.join(given)} must be the same number, got {given}")
    if top_k > experts:
        raise ConfigError(f"{config.where}: num_experts_per_tok {top_k} exceeds {names[0]} {experts}")
    return RouterSpec(**dict(num_experts=experts, top_k=top_k) | options)


def sparse_layers(config: Fields) -> tuple[bool, ...]:
    """Which layers have experts, by `mlp_only_layers` and `decoder_sparse_step` (Qwen)."""
    dense, step = config.ints("mlp_only_layers", ()), config.size("decoder_sparse_step")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(config.size("num_hidden_layers")))


def sigmoid_router(config: Fields) -> RouterSpec:
    """DeepSeek-V3's router (arXiv 2412.19437), which others took over."""
    count, best = config.size("n_group"), config.size("topk_group")
    spec = router(
        config,
        *("n_routed_experts", "num_local_experts", "num_experts"),
        score="sigmoid",
        correction_bias=True,
        groups=Groups(n_group=count, topk_group=best, score="top2") if count > 1 else None,
        normalize=config.flag("norm_topk_prob"),
        eps=1e-20,
        scale=config.number("routed_scaling_factor"),
        rounded=False,
    )
    check_groups(config, spec, count, best)
    return spec


def layer_types(
    config: Fields, default: tuple[str, ...], known: tuple[str, ...], name: str = "layer_types"
) -> tuple[str, ...]:
    """The kind of each layer from a list. Raises `ConfigError` for an unknown kind or a wrong count."""
    types, layers = config.texts(name, default), config.size("num_hidden_layers")
    if len(types) != layers:
        raise ConfigError(f"{config.where}: {name} has {len(types)} entries for num_hidden_layers {layers}")
    for kind in types:
        if kind not in known:
            raise config.unsupported(name, kind, known)
    return types


def check_groups(config: Fields, spec: RouterSpec, count: int, best: int) -> None:
    """Raises `ConfigError` where `best` of `count` groups of experts cannot be."""
    size = spec.num_experts // count
    if spec.num_experts % count or best > count or best * size < spec.top_k or (count > 1 and size < 2):
        raise ConfigError(
            f"{config.where}: n_group {count} must divide the {spec.num_experts} experts into groups of two or more, "
            f"topk_group {best} of which hold num_experts_per_tok {spec.top_k}"
        )


def shared_expert(config: Fields) -> SharedSpec | None:
    """DeepSeek's shared experts, which are one MLP that is so many times as wide."""
    count = config.count("n_shared_experts")
    width = config.size("moe_intermediate_size") * count
    return SharedSpec(mlp=DenseSpec(width=width), gated=False) if count else None


def dense_mlp(config: Fields) -> DenseSpec:
    return DenseSpec(width=config.size("intermediate_size"))


def model(config: Fields, *, family: str, layers: tuple[LayerSpec, ...], norm: RMSNorm, **options: Any) -> ModelSpec:
    """The fields that all families share; `options` are fields of `ModelSpec`."""
    dtype, quantization = weight_dtype(config), read_quantization(config)
    expert_dtype, expert_scales = expert_format(config, dtype, quantization)
    return ModelSpec(
        **dict(
            family=family,
            vocab=config.size("vocab_size"),
            hidden=config.size("hidden_size"),
            context=config.size("max_position_embeddings"),
            norm=norm,
            tied=config.flag("tie_word_embeddings"),
            layers=layers,
            dtype=dtype,
            expert_dtype=expert_dtype,
            expert_scales=expert_scales,
            quantization=quantization,
        )
        | options
    )


def weight_dtype(config: Fields) -> np.dtype:
    """What `torch_dtype`/`dtype` says of weights that are not quantised."""
    name = config.text("dtype", config.text("torch_dtype", "bfloat16"))
    if name not in FLOATS:
        raise config.unsupported("dtype", name, tuple(FLOATS))
    return FLOATS[name]


def expert_format(
    config: Fields, dtype: np.dtype, quantization: Quantization | None
) -> tuple[np.dtype, ScaleKind | None]:
    """Dtype and scales of experts in memory. FP8 whose scales no kernel has is dequantised."""
    if quantization is None:
        return dtype, None
    if quantization.dtype == FP4:
        for name in ("hidden_size", "intermediate_size"):
            if config.size(name) % FP4_BLOCK:
                raise ConfigError(
                    f"{config.where}: {name} {config.size(name)} must be a multiple of {FP4_BLOCK} for MXFP4 experts"
                )
        return FP4, None
    return (FP8, quantization.scales) if quantization.scales else (dtype, None)
