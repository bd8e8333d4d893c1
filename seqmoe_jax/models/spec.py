"""The frozen description of a decoder, parsed from a Hugging Face `config.json`.

A family is a function from that file to a `ModelSpec`, registered in `FAMILIES`; everything after it reads the
spec alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from pallas_kernels.layout import FP8, ExpertLayout, swiglu_layout
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.models.fields import Fields

FLOATS = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query softmax attention with rotary positions (half layout over the whole head)."""

    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    qk_norm: bool


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """A SwiGLU MLP that every token passes."""

    width: int


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """Softmax router over `experts`, `top_k` of them active, each a SwiGLU MLP of `width`."""

    experts: int
    top_k: int
    width: int
    normalize: bool  # divide the selected probabilities by their sum


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    attention: AttentionSpec
    mlp: DenseSpec | MoESpec


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything the program's shapes depend on. Hashable: a static argument of the jitted functions."""

    family: str
    vocab: int
    hidden: int
    context: int  # longest sequence the model was made for, in tokens
    norm_eps: float
    tied: bool  # the output head is the embedding
    layers: tuple[LayerSpec, ...]
    dtype: np.dtype  # of the dense weights in the checkpoint
    expert_dtype: np.dtype  # of the experts' matrices in host pool and slots
    fp8_block: tuple[int, int] | None  # rows, columns per scale in the checkpoint; None where nothing is FP8

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have experts; their count is the L of every key."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.mlp, MoESpec))

    @property
    def moe(self) -> MoESpec:
        """The (single) kind of MoE layer. Raises `ConfigError` for a model without experts or with several kinds."""
        kinds = {layer.mlp for layer in self.layers if isinstance(layer.mlp, MoESpec)}
        if len(kinds) != 1:
            raise ConfigError(
                f"config.json: expected one kind of MoE layer, got {len(kinds)}; a dense model has nothing to offload"
            )
        return kinds.pop()

    @property
    def num_keys(self) -> int:
        """L * E: how many experts the model has."""
        return len(self.moe_layers) * self.moe.experts

    @property
    def expert_layout(self) -> ExpertLayout:
        return swiglu_layout(hidden=self.hidden, width=self.moe.width, dtype=self.expert_dtype)


def _rope_theta(config: Fields) -> float:
    """`rope_parameters` of newer files, `rope_theta` + `rope_scaling` of older ones; only unscaled rotary positions."""
    for name in ("rope_parameters", "rope_scaling"):
        group = config.group(name)
        kind = group.text("rope_type", group.text("type", "default"))
        if kind != "default":
            raise ConfigError(
                f"config.json: {name}.rope_type {kind!r} is not supported for this family; supported: 'default'"
            )
    return config.group("rope_parameters").number("rope_theta", config.number("rope_theta", 10000.0))


def _weight_dtypes(config: Fields) -> tuple[np.dtype, np.dtype, tuple[int, int] | None]:
    """(dense dtype, expert dtype, FP8 block) from `torch_dtype`/`dtype` and `quantization_config`."""
    name = config.text("dtype", config.text("torch_dtype", "bfloat16"))
    if name not in FLOATS:
        raise ConfigError(f"config.json: dtype {name!r} is not supported; supported: {', '.join(FLOATS)}")
    dtype = FLOATS[name]
    quantization = config.group("quantization_config")
    if not quantization.values:
        return dtype, dtype, None
    method = quantization.text("quant_method")
    if method != "fp8":
        raise ConfigError(
            f"config.json: quantization_config.quant_method {method!r} is not supported here; supported: 'fp8'"
        )
    if quantization.text("fmt", "e4m3") != "e4m3":
        raise ConfigError(
            f"config.json: quantization_config.fmt {quantization.text('fmt')!r} is not supported; supported: 'e4m3'"
        )
    block = quantization.ints("weight_block_size", (128, 128))
    if len(block) != 2 or min(block) <= 0:
        raise ConfigError(
            f"config.json: quantization_config.weight_block_size must be two positive integers, got {block}"
        )
    # Kernels know scales of 128 x 128 blocks; any other block size is dequantised while loading.
    return dtype, FP8 if block == (128, 128) else dtype, (block[0], block[1])


def qwen3_moe(config: Fields) -> ModelSpec:
    """Qwen3-MoE (Qwen3-30B-A3B and relatives): qk-norm attention, softmax router, no shared expert."""
    if config.flag("attention_bias", False):
        raise ConfigError("config.json: attention_bias true is not supported for qwen3_moe; supported: false")
    if config.flag("use_sliding_window", False):
        raise ConfigError("config.json: use_sliding_window true is not supported for qwen3_moe; supported: false")
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"config.json: hidden_act {activation!r} is not supported for qwen3_moe; supported: 'silu'")
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    hidden = config.size("hidden_size")
    head_dim = config.size("head_dim", max(1, hidden // heads))
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(
            f"config.json: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads} "
            f"and head_dim {head_dim} even"
        )
    attention = AttentionSpec(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope_theta=_rope_theta(config), qk_norm=True
    )
    moe = MoESpec(
        # Files saved by transformers 5 name the count num_local_experts.
        experts=config.size("num_experts", aliases=("num_local_experts",)),
        top_k=config.size("num_experts_per_tok"),
        width=config.size("moe_intermediate_size"),
        normalize=config.flag("norm_topk_prob", False),
    )
    if moe.top_k > moe.experts:
        raise ConfigError(f"config.json: num_experts_per_tok {moe.top_k} exceeds num_experts {moe.experts}")
    dense_layers = config.ints("mlp_only_layers", ())
    sparse_step = config.size("decoder_sparse_step", 1)
    layers = tuple(
        LayerSpec(
            attention=attention,
            mlp=moe
            if i not in dense_layers and (i + 1) % sparse_step == 0
            else DenseSpec(width=config.size("intermediate_size")),
        )
        for i in range(config.size("num_hidden_layers"))
    )
    dtype, expert_dtype, block = _weight_dtypes(config)
    return ModelSpec(
        family="qwen3_moe",
        vocab=config.size("vocab_size"),
        hidden=hidden,
        context=config.size("max_position_embeddings"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        tied=config.flag("tie_word_embeddings", False),
        layers=layers,
        dtype=dtype,
        expert_dtype=expert_dtype,
        fp8_block=block,
    )


FAMILIES: Mapping[str, Callable[[Fields], ModelSpec]] = {"qwen3_moe": qwen3_moe}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Contents of a `config.json` -> `ModelSpec`. Raises `ConfigError` for what is unknown or unsupported."""
    fields = Fields(config)
    family = fields.text("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"config.json: model_type {family!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    spec = FAMILIES[family](fields)
    spec.moe  # a dense model is refused here, not deep inside  # noqa: B018
    return spec
