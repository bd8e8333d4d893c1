"""Which checkpoint tensor gives which model tensor, as data: a family is one function that returns a `NameMap`.

Model names are ours and the same in every family: `embed`, `final_norm`, `lm_head`, and below `layers.{i}.`
`input_norm`, `post_norm`, `attention.{q,k,v,o,q_norm,k_norm}` (with `_bias`), `router`, `mlp.{gate,up,down}` (dense
layers). Experts are counted by MoE layer, not by layer; their fields are those of the expert layout.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from seqmoe_jax.checkpoints.fp8 import DEFAULT_BLOCK, FP8, SCALE_DTYPES, block_size, scale_shape
from seqmoe_jax.checkpoints.safetensors import Checkpoint
from seqmoe_jax.errors import CheckpointError, ConfigError

FLOATS = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint tensor of `shape`, or one contiguous part of it: `[expert]` of the first axis, then `rows` of it."""

    tensor: str
    shape: tuple[int, ...]
    expert: int | None = None
    rows: tuple[int, int] | None = None

    @property
    def part_shape(self) -> tuple[int, ...]:
        shape = self.shape if self.expert is None else self.shape[1:]
        return shape if self.rows is None else (self.rows[1] - self.rows[0], *shape[1:])

    def byte_range(self, itemsize: int) -> tuple[int, int]:
        """Offset inside the tensor, and length, in bytes."""
        inner = self.shape if self.expert is None else self.shape[1:]
        start = 0 if self.expert is None else self.expert * math.prod(inner)
        if self.rows is not None:
            start += self.rows[0] * math.prod(inner[1:])
        return start * itemsize, math.prod(self.part_shape) * itemsize


@dataclass(frozen=True, kw_only=True)
class NameMap:
    """Sources of every tensor of one model. `scale_suffix` turns a weight's name into that of its FP8 scales.

    `dense[name]`; `experts[moe_layer][expert][field]`; `layer_index[moe_layer]` is the layer's number in the model.
    `ignored` are patterns of checkpoint tensors that the model has no use for.
    """

    dense: Mapping[str, Source]
    experts: tuple[tuple[Mapping[str, Source], ...], ...]
    layer_index: tuple[int, ...]
    block: tuple[int, int] = DEFAULT_BLOCK
    scale_suffix: tuple[str, str] = ("", "_scale_inv")
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)

    def sources(self) -> Iterator[Source]:
        yield from self.dense.values()
        for layer in self.experts:
            for expert in layer:
                yield from expert.values()

    def scale_source(self, source: Source) -> Source:
        """The scales of an FP8 weight. Raises `ConfigError` where a part begins in the middle of a block."""
        end, replacement = self.scale_suffix
        rows = source.rows
        if rows is not None:
            if rows[0] % self.block[0]:
                raise ConfigError(
                    f"tensor {source.tensor!r}: expected parts that start at a multiple of {self.block[0]} rows (the FP8 "
                    f"block), got row {rows[0]}; save the checkpoint with one tensor per expert"
                )
            rows = (rows[0] // self.block[0], math.ceil(rows[1] / self.block[0]))
        return Source(
            tensor=source.tensor.removesuffix(end) + replacement,
            shape=scale_shape(source.shape, self.block),
            expert=source.expert,
            rows=rows,
        )


def check_names(checkpoint: Checkpoint, names: NameMap) -> None:
    """Compares map and headers before any weight is read. Raises `CheckpointError` with counts and the first names."""
    wanted: dict[str, tuple[int, ...]] = {}
    missing: list[str] = []
    wrong: list[str] = []

    def see(name: str, shape: tuple[int, ...], allowed: Callable[[np.dtype], bool]) -> None:
        if name in wanted:
            return
        wanted[name] = shape
        if name not in checkpoint.names:
            missing.append(name)
            return
        info = checkpoint.info(name)
        if info.shape != shape:
            wrong.append(f"{name} {list(info.shape)} for {list(shape)}")
        elif not allowed(info.dtype):
            wrong.append(f"{name} of {info.dtype}")

    for source in names.sources():
        see(source.tensor, source.shape, lambda dtype: dtype == FP8 or dtype.name in FLOATS)
        if source.tensor in checkpoint.names and checkpoint.info(source.tensor).dtype == FP8:
            scale = names.scale_source(source)
            see(scale.tensor, scale.shape, lambda dtype: dtype in SCALE_DTYPES)
    extra = [
        name
        for name in checkpoint.names
        if name not in wanted and not any(fnmatch.fnmatchcase(name, pattern) for pattern in names.ignored)
    ]
    found = [(missing, "missing"), (wrong, "of a wrong shape or dtype"), (extra, "unexpected")]
    faults = [f"{len(which)} {what} ({_first(which)})" for which, what in found if which]
    if faults:
        raise CheckpointError(
            f"{checkpoint.directory}: expected the {len(wanted)} tensors that config.json calls for, got "
            f"{', '.join(faults)}; do config.json and weights belong together?"
        )


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def qwen3_moe_names(config: Mapping[str, Any], available: Set[str]) -> NameMap:
    """Qwen3-MoE (`config.json` of transformers 4 or 5). `available` (the checkpoint's names) tells the expert layout.

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

    One tensor per expert and matrix (what transformers writes), or fused as it holds them: `gate_up_proj [E, 2F, H]`
    (gate first) and `down_proj [E, H, F]`.
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
