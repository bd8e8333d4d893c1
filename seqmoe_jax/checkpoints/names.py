"""Which checkpoint tensor gives which model tensor, as data: a family is a function that gives a `NameMap`.

Model names are ours and the same in every family: `embed`, `final_norm`, `lm_head`, and below `layers.{i}.`
`input_norm`, `post_norm`, `attention.{q,k,v,o,q_norm,k_norm}` (with `_bias`), `router`, `mlp.{gate,up,down}`
(dense layers). Experts are counted by MoE layer, not by layer; their fields are those of the expert layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from seqmoe_jax.checkpoints.fp8 import block_size
from seqmoe_jax.checkpoints.sources import NameMap, Source, check_names
from seqmoe_jax.errors import ConfigError

__all__ = ["NameMap", "Source", "check_names", "qwen3_moe_layers", "qwen3_moe_names", "swiglu_expert_sources"]


def qwen3_moe_names(config: Mapping[str, Any], available: Set[str]) -> NameMap:
    """Qwen3-MoE, from a `config.json` of transformers 4 or 5.

    `available`, the checkpoint's names, tells which layout its experts have.
    Raises `ConfigError` for a missing or malformed field.
    """
    hidden, layers = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
    heads, kv_heads = _size(config, "num_attention_heads"), _size(config, "num_key_value_heads")
    head_dim = _size(config, "head_dim") if config.get("head_dim") is not None else hidden // heads
    vocab = _size(config, "vocab_size")
    moe_layers = qwen3_moe_layers(config)
    dense = {
        "embed": Source(tensor="model.embed_tokens.weight", shape=(vocab, hidden)),
        "final_norm": Source(tensor="model.norm.weight", shape=(hidden,)),
    }
    tied = bool(config.get("tie_word_embeddings", False))
    if not tied:
        dense["lm_head"] = Source(tensor="lm_head.weight", shape=(vocab, hidden))
    outputs = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim, "o": hidden}
    for layer in range(layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        dense[ours + "input_norm"] = Source(tensor=theirs + "input_layernorm.weight", shape=(hidden,))
        dense[ours + "post_norm"] = Source(tensor=theirs + "post_attention_layernorm.weight", shape=(hidden,))
        for name, rows in outputs.items():
            cols = heads * head_dim if name == "o" else hidden
            tensor = f"{theirs}self_attn.{name}_proj"
            dense[f"{ours}attention.{name}"] = Source(tensor=f"{tensor}.weight", shape=(rows, cols))
            if config.get("attention_bias", False):
                dense[f"{ours}attention.{name}_bias"] = Source(tensor=f"{tensor}.bias", shape=(rows,))
        for name in ("q_norm", "k_norm"):
            dense[f"{ours}attention.{name}"] = Source(
                tensor=f"{theirs}self_attn.{name}.weight", shape=(head_dim,)
            )
        if layer in moe_layers:
            shape = (_num_experts(config), hidden)
            dense[ours + "router"] = Source(tensor=theirs + "mlp.gate.weight", shape=shape)
        else:
            width = _size(config, "intermediate_size")
            for name, shape in _matrices(hidden, width).items():
                dense[f"{ours}mlp.{name}"] = Source(tensor=f"{theirs}mlp.{name}_proj.weight", shape=shape)
    experts = tuple(
        swiglu_expert_sources(
            f"model.layers.{layer}.mlp.experts",
            num_experts=_num_experts(config),
            hidden=hidden,
            width=_size(config, "moe_intermediate_size"),
            available=available,
        )
        for layer in moe_layers
    )
    ignored = ("*.rotary_emb.inv_freq", *(("lm_head.weight",) if tied else ()))
    return NameMap(
        dense=dense, experts=experts, layer_index=moe_layers, block=block_size(config), ignored=ignored
    )


def swiglu_expert_sources(
    prefix: str, *, num_experts: int, hidden: int, width: int, available: Set[str]
) -> tuple[dict[str, Source], ...]:
    """Sources of `gate`, `up`, `down` of one layer's experts, in either layout.

    One tensor per expert and matrix (what transformers writes), or fused as it holds them: `gate_up_proj [E,
    2F, H]` (gate first) and `down_proj [E, H, F]`.
    """
    if f"{prefix}.gate_up_proj" not in available:
        return tuple(
            {
                name: Source(tensor=f"{prefix}.{expert}.{name}_proj.weight", shape=shape)
                for name, shape in _matrices(hidden, width).items()
            }
            for expert in range(num_experts)
        )
    both, down = (num_experts, 2 * width, hidden), (num_experts, hidden, width)
    return tuple(
        {
            "gate": Source(tensor=f"{prefix}.gate_up_proj", shape=both, expert=expert, rows=(0, width)),
            "up": Source(tensor=f"{prefix}.gate_up_proj", shape=both, expert=expert, rows=(width, 2 * width)),
            "down": Source(tensor=f"{prefix}.down_proj", shape=down, expert=expert),
        }
        for expert in range(num_experts)
    )


def qwen3_moe_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Numbers of the layers that have experts."""
    step = _size(config, "decoder_sparse_step") if "decoder_sparse_step" in config else 1
    dense = config.get("mlp_only_layers") or ()
    return tuple(
        layer
        for layer in range(_size(config, "num_hidden_layers"))
        if layer not in dense and (layer + 1) % step == 0
    )


def _matrices(hidden: int, width: int) -> dict[str, tuple[int, int]]:
    return {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}


def _num_experts(config: Mapping[str, Any]) -> int:
    # transformers 5 saves the name on the right.
    return _size(config, "num_experts" if "num_experts" in config else "num_local_experts")


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"config.json: expected {name} to be a positive integer, got {value!r}")
    return value
