"""Which checkpoint tensor gives which model tensor, as data: a family is a function that gives a `NameMap`.

Model names are ours and the same in every family: `embed`, `final_norm`, `lm_head`, and below `layers.{i}.`
`input_norm`, `post_norm`, `attention.{q,k,v,o,q_norm,k_norm}`, `router`, `mlp.{gate,up,down}`
(dense layers). Experts are counted by MoE layer, not by layer; their fields are those of the expert layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from seqmoe_jax.checkpoints.fp8 import DEFAULT_BLOCK
from seqmoe_jax.checkpoints.sources import NameMap, Source, check_names
from seqmoe_jax.models.spec import ModelSpec, MoESpec

__all__ = ["NameMap", "Source", "check_names", "names_of", "swiglu_expert_sources"]


def names_of(spec: ModelSpec, available: Set[str]) -> NameMap:
    """The name map of a model. `available`, the checkpoint's names, tells which layout its experts have."""
    return _FAMILIES[spec.family](spec, available)


def qwen3_moe_names(spec: ModelSpec, available: Set[str]) -> NameMap:
    """Qwen3-MoE, as published and as transformers 5 saves it."""
    hidden = spec.hidden
    dense = {
        "embed": Source(tensor="model.embed_tokens.weight", shape=(spec.vocab, hidden)),
        "final_norm": Source(tensor="model.norm.weight", shape=(hidden,)),
    }
    if not spec.tied:
        dense["lm_head"] = Source(tensor="lm_head.weight", shape=(spec.vocab, hidden))
    for index, layer in enumerate(spec.layers):
        ours, theirs, attention = f"layers.{index}.", f"model.layers.{index}.", layer.attention
        dense[ours + "input_norm"] = Source(tensor=theirs + "input_layernorm.weight", shape=(hidden,))
        dense[ours + "post_norm"] = Source(tensor=theirs + "post_attention_layernorm.weight", shape=(hidden,))
        queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        shapes = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
        for name, shape in shapes.items():
            tensor = f"{theirs}self_attn.{name}_proj.weight"
            dense[f"{ours}attention.{name}"] = Source(tensor=tensor, shape=shape)
        for name in ("q_norm", "k_norm"):
            tensor = f"{theirs}self_attn.{name}.weight"
            dense[f"{ours}attention.{name}"] = Source(tensor=tensor, shape=(attention.head_dim,))
        if isinstance(layer.mlp, MoESpec):
            dense[ours + "router"] = Source(tensor=theirs + "mlp.gate.weight", shape=(layer.mlp.experts, hidden))
        else:
            for name, shape in _matrices(hidden, layer.mlp.width).items():
                dense[f"{ours}mlp.{name}"] = Source(tensor=f"{theirs}mlp.{name}_proj.weight", shape=shape)
    experts = tuple(
        swiglu_expert_sources(
            f"model.layers.{index}.mlp.experts",
            num_experts=spec.moe.experts,
            hidden=hidden,
            width=spec.moe.width,
            available=available,
        )
        for index in spec.moe_layers
    )
    return NameMap(
        dense=dense,
        experts=experts,
        layer_index=spec.moe_layers,
        block=spec.fp8_block or DEFAULT_BLOCK,
        ignored=("*.rotary_emb.inv_freq", *(("lm_head.weight",) if spec.tied else ())),
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


def _matrices(hidden: int, width: int) -> dict[str, tuple[int, int]]:
    return {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}


_FAMILIES: Mapping[str, Callable[[ModelSpec, Set[str]], NameMap]] = {"qwen3_moe": qwen3_moe_names}
