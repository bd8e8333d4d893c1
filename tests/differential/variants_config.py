"""Other spellings of a `config.json`, the same with fields left out, and with other values in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from checkpoints import COMMON, FAMILIES
from directories import Variant, changing, read_config, write_config

Config = dict[str, Any]

# Names by which files have given the number of experts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# What says which program may read the directory, and by whom it was written.
HEADER = ("model_type", "architectures", "transformers_version")
# What stands in published files beside the fields of the classes, and in none of the tiny ones.
BESIDE: Config = {
    "attention_multiplier": 0.5, "attn_output_gate": False, "clip_qkv": 0.2, "embedding_multiplier": 2.0,
    "experts_per_token": 1, "ep_size": 2, "final_logit_softcapping": 5.0, "first_k_dense_replace": 2,
    "full_attention_interval": 2, "head_dim": 32, "initial_context_length": 32, "layer_types": ["full_attention"] * 2,
    "logits_scaling": 3.0, "logit_scale": 3.0, "max_window_layers": 1, "mlp_bias": True, "mlp_only_layers": [0],
    "moe_layer_freq": 2, "moe_router_enable_expert_bias": True, "mtp_num_hidden_layers": 1, "n_group": 2,
    "norm_topk_prob": True, "num_nextn_predict_layers": 1, "num_shared_experts": 2,
    "original_max_position_embeddings": 32, "partial_rotary_factor": 0.5, "pretraining_tp": 2,
    "q_lora_rank": 16, "qk_layernorm": True, "qkv_bias": True, "query_pre_attn_scalar": 8, "residual_multiplier": 0.5,
    "rope_interleave": False, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 500.0,
    "routed_scaling_factor": 3.0, "scale_emb": 2.0, "scoring_func": "softmax", "shared_expert_gate": False,
    "sliding_window": 7, "sliding_window_pattern": 2, "swiglu_alpha": 2.0, "swiglu_limit": 0.5, "topk_group": 1,
    "topk_method": "greedy", "use_qk_norm": True, "use_sliding_window": True, "use_mrope": True,
}  # fmt: skip
ROPES: dict[str, Config] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn by type": {"type": "yarn", "factor": 8, "original_max_position_embeddings": 32, "beta_fast": 16},
    "yarn without a length": {"rope_type": "yarn", "factor": 4.0},
    "yarn of no factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32},
    "yarn with a factor of its own": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7},
    "yarn with zero betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0, "beta_slow": 0},
    "yarn far away": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100_000_000},
    "yarn nearby": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 3},
    "yarn that is not truncated": {"rope_type": "yarn", "factor": 4.0, "truncate": False},
    "yarn of another base": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 300.0},
    "yarn with mscale alone": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7},
    "yarn with both mscales": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn of a part": {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32},
    "default": {"rope_type": "default"},
    "default of another base": {"rope_type": "default", "rope_theta": 700.0},
    "default of a part": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "by layer type": {"full_attention": {"rope_type": "default", "rope_theta": 700.0},
                      "sliding_attention": {"rope_type": "default", "rope_theta": 90.0}},
}  # fmt: skip


def spellings(family: str, config: Config) -> Iterator[Variant]:
    """The same model in other words, or nearly."""

    def variant(name: str, change: Callable[[Config], Config], **more: Any) -> Variant:
        return Variant(family=family, axis="spelling", name=name, write=changing(change), **more)

    yield variant("as saved", lambda config: config)
    yield variant("as transformers 4 writes it", old)
    yield variant("rope_scaling is null", lambda config: config | {"rope_scaling": None})
    yield variant("rope_scaling is empty", lambda config: config | {"rope_scaling": {}})
    yield variant("rope_theta stands outside", lambda config: _without_theta(config) | {"rope_theta": 5000.0})
    yield variant("rope_theta stands in both places", lambda config: config | {"rope_theta": 5000.0})
    yield variant("no rope_theta", _without_theta)
    yield variant("no rope at all", lambda config: _without(config, "rope_parameters"))
    # transformers writes null here for some model types, and does not read it beside YaRN.
    head = {"head_dim": config["hidden_size"] // config["num_attention_heads"]} if "head_dim" in config else {}
    head = head if config.get("head_dim", 0) is None else {}
    for name, rope in ROPES.items():
        yield variant(f"rope_parameters: {name}", lambda config, rope=rope: config | head | {"rope_parameters": rope})
        yield variant(f"rope_scaling: {name}", lambda config, rope=rope: config | head | {"rope_scaling": rope})
        yield variant(
            f"rope_scaling: {name}, rope_theta outside",
            lambda config, rope=rope: (
                _without(config, "rope_parameters") | head | {"rope_scaling": rope, "rope_theta": 800.0}
            ),
        )
        yield variant(
            f"rope_parameters: {name}, a length outside",
            lambda config, rope=rope: config | head | {"rope_parameters": rope, "original_max_position_embeddings": 48},
        )
    for said in EXPERTS:
        found = next(name for name in EXPERTS if name in config)
        if said != found:
            yield variant(f"{said} for {found}", lambda config, said=said, found=found: _renamed(config, found, said))
            yield variant(f"{said} beside {found}", lambda config, said=said: config | {said: 2})
    if family == "qwen3_5_moe_text":
        yield variant("nested", nested)
        yield variant("nested, old", lambda config: nested(old(config)))
        yield variant("nested, dtype outside", lambda config: nested(_without(config, "dtype")) | {"dtype": "bfloat16"})


def absent(family: str, config: Config) -> Iterator[Variant]:
    """A field left out, and a field that is null."""
    for name in config:
        if name not in HEADER:
            words = EXPERTS if name in EXPERTS else (name,)
            yield Variant(
                family=family, axis="absent", name=name, words=words,
                write=changing(lambda config, name=name: _without(config, name)),
            )  # fmt: skip
            yield Variant(
                family=family, axis="null", name=name,
                write=changing(lambda config, name=name: config | {name: None}),
            )  # fmt: skip


def values(family: str, config: Config) -> Iterator[Variant]:
    """Another value of a field, and a field that other files have."""
    for name, value in config.items():
        if name not in HEADER:
            for other in others(name, value):
                yield Variant(
                    family=family, axis="value", name=f"{name} {value!r} -> {other!r}",
                    write=changing(lambda config, name=name, other=other: config | {name: other}),
                )  # fmt: skip
    for name, value in BESIDE.items():
        if name not in config:
            yield Variant(
                family=family, axis="beside", name=f"{name} {value!r}",
                write=changing(lambda config, name=name, value=value: config | {name: value}),
            )  # fmt: skip


def others(name: str, value: Any) -> list[Any]:
    """Values that a file may have in the place of this one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [other for other in dict.fromkeys((value + 1, value // 2, 1)) if other != value]
    if isinstance(value, float):
        return [other for other in dict.fromkeys((value * 3, value / 2, 0.0)) if other != value]
    if isinstance(value, str):
        return ["gelu", "softmax", "float32"]
    if value is None:
        return [3, 0.5, True]
    if isinstance(value, list) and value:
        return [value[::-1], value[:1] * len(value), value[:-1], []]
    if isinstance(value, list):
        return [[0]]
    if isinstance(value, dict):
        return [value | {key: other} for key, inner in value.items() for other in others(key, inner)[:2]]
    raise TypeError(name)


def published(family: str, config: Config) -> Iterator[Variant]:
    """The form in which its makers publish a file, with each field left out, and beside fields of transformers."""
    whole = {"model_type": family, "torch_dtype": "bfloat16", **COMMON, **FAMILIES[family][1]}
    changes: dict[str, Config] = {"as it is": whole}
    changes |= {f"without {name}": _without(whole, name) for name in whole if name not in HEADER}
    changes |= {f"with {name}": whole | {name: value} for name, value in config.items() if name not in whole}
    changes |= {f"{name} outside": whole | {name: value} for name, value in {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "compress_rate_csa": 4, "compress_rate_hca": 16, "partial_rotary_factor": 0.5, "rope_theta": 500.0,
        "layer_types": config.get("layer_types", [])[::-1], "num_nextn_predict_layers": 2,
    }.items()}  # fmt: skip
    for name, other in changes.items():
        yield Variant(
            family=family, axis="published", name=name, write=changing(lambda config, other=other: other)
        )  # fmt: skip


def variants(family: str, directory: Path) -> Iterator[Variant]:
    config = read_config(directory)
    yield from spellings(family, config)
    yield from absent(family, config)
    yield from values(family, config)
    if family == "deepseek_v4":  # the others are published in the words of transformers
        yield from published(family, config)


def old(config: Config) -> Config:
    """As transformers 4 wrote it: `torch_dtype`, `rope_theta` and, if there is more to say, `rope_scaling`."""
    config = dict(config)
    rope = dict(config.pop("rope_parameters"))
    config["torch_dtype"] = config.pop("dtype")
    if "main" in rope:  # DeepSeek-V4
        rope = {**rope["compress"], "rope_theta": rope["main"]["rope_theta"]}
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    return config


def nested(config: Config) -> Config:
    return {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": config}


def nest(directory: Path) -> None:
    write_config(directory, nested(read_config(directory)))


def _without(config: Config, *names: str) -> Config:
    return {name: value for name, value in config.items() if name not in names}


def _without_theta(config: Config) -> Config:
    return config | {"rope_parameters": _without(config["rope_parameters"], "rope_theta")}


def _renamed(config: Config, old: str, new: str) -> Config:
    return {new if name == old else name: value for name, value in config.items()}
