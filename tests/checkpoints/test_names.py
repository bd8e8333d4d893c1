"""Name maps: both expert layouts, FP8 scales, and faults found before anything is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from seqmoe_jax.checkpoints.check import check_names
from seqmoe_jax.checkpoints.names import names_of
from seqmoe_jax.checkpoints.read import iter_dense, read_part, read_source
from seqmoe_jax.checkpoints.safetensors import Checkpoint, open_checkpoint
from seqmoe_jax.checkpoints.scales import scales_of
from seqmoe_jax.checkpoints.sources import Source
from seqmoe_jax.errors import CheckpointError, ConfigError
from seqmoe_jax.models.families import spec_from_config

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_experts": 4,
    "mlp_only_layers": [1],
}


def tensors(config: dict[str, Any] = CONFIG, available: frozenset[str] = frozenset()) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sources = names_of(spec_from_config(config), available).sources()
    return {source.tensor: rng.standard_normal(source.shape, np.float32) for source in sources}


def fused(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Per-expert tensors -> `gate_up_proj [E, 2F, H]` and `down_proj [E, H, F]`."""
    arrays = dict(arrays)
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp.experts."
        part = {
            kind: np.stack([arrays.pop(f"{prefix}{e}.{kind}_proj.weight") for e in range(4)])
            for kind in ("gate", "up", "down")
        }
        arrays[prefix + "gate_up_proj"] = np.concatenate([part["gate"], part["up"]], 1)
        arrays[prefix + "down_proj"] = part["down"]
    return arrays


def saved(directory: Path, arrays: dict[str, np.ndarray]) -> Checkpoint:
    save_file(arrays, directory / "model.safetensors")
    return open_checkpoint(directory)


@pytest.mark.parametrize("layout", ["one tensor per expert", "fused"])
def test_both_expert_layouts_give_the_same_experts(tmp_path: Path, layout: str):
    arrays = tensors()
    checkpoint = saved(tmp_path, fused(arrays) if layout == "fused" else arrays)
    names = names_of(spec_from_config(CONFIG), checkpoint.names)
    check_names(checkpoint, names)
    assert names.layer_index == (0, 2)
    assert [len(layer) for layer in names.experts] == [4, 4]
    for index, layer in enumerate(names.layer_index):
        for expert, sources in enumerate(names.experts[index]):
            for field, source in sources.items():
                expected = arrays[f"model.layers.{layer}.mlp.experts.{expert}.{field}_proj.weight"]
                np.testing.assert_array_equal(read_part(checkpoint, source), expected)


def test_dense_tensors_come_one_by_one_in_the_asked_dtype(tmp_path: Path):
    arrays = tensors()
    checkpoint = saved(tmp_path, arrays)
    names = names_of(spec_from_config(CONFIG), checkpoint.names)
    dense = dict(iter_dense(checkpoint, names, dtypes=dict.fromkeys(names.dense, np.dtype(ml_dtypes.bfloat16))))
    assert dense.keys() == names.dense.keys()
    assert {str(value.dtype) for value in dense.values()} == {"bfloat16"}
    expected = {
        "embed": "model.embed_tokens.weight",
        "lm_head": "lm_head.weight",
        "final_norm": "model.norm.weight",
        "layers.0.input_norm": "model.layers.0.input_layernorm.weight",
        "layers.2.post_norm": "model.layers.2.post_attention_layernorm.weight",
        "layers.1.mixer.o": "model.layers.1.self_attn.o_proj.weight",
        "layers.1.mixer.k_norm": "model.layers.1.self_attn.k_norm.weight",
        "layers.1.mlp.gate": "model.layers.1.mlp.gate_proj.weight",
        "layers.2.router.weight": "model.layers.2.mlp.gate.weight",
    }
    for ours, theirs in expected.items():
        np.testing.assert_array_equal(dense[ours], arrays[theirs].astype(ml_dtypes.bfloat16))


def test_tied_head_and_old_buffers_are_ignored(tmp_path: Path):
    config = CONFIG | {"tie_word_embeddings": True}
    arrays = tensors(config) | {
        "lm_head.weight": np.zeros((24, 16), np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(3, np.float32),
    }
    checkpoint = saved(tmp_path, arrays)
    names = names_of(spec_from_config(config), checkpoint.names)
    assert "lm_head" not in names.dense
    check_names(checkpoint, names)


def test_every_fault_is_in_one_line(tmp_path: Path):
    arrays = tensors()
    for expert in range(4):
        del arrays[f"model.layers.2.mlp.experts.{expert}.up_proj.weight"]
    arrays["model.norm.weight"] = np.zeros(17, np.float32)
    arrays["lm_head.weight"] = arrays["lm_head.weight"].astype(np.int32)
    arrays["model.patch"] = np.zeros(1, np.float32)
    checkpoint = saved(tmp_path, arrays)
    with pytest.raises(CheckpointError) as caught:
        check_names(checkpoint, names_of(spec_from_config(CONFIG), checkpoint.names))
    line = str(caught.value)
    assert "\n" not in line
    assert "4 missing (model.layers.2.mlp.experts.0.up_proj.weight, " in line
    assert "2 of a wrong shape or dtype (model.norm.weight [17] for [16], lm_head.weight of int32)" in line
    assert "1 unexpected (model.patch)" in line


def fp8_checkpoint(directory: Path, block: int, *, scales: bool = True) -> tuple[Checkpoint, dict[str, Any]]:
    quantization = {"quant_method": "fp8", "weight_block_size": [block, block]}
    config = CONFIG | {"quantization_config": quantization}
    arrays: dict[str, np.ndarray] = {}
    for name, array in tensors(config).items():
        fp8 = name.endswith("_proj.weight")
        arrays[name] = array.astype(ml_dtypes.float8_e4m3fn) if fp8 else array
        if fp8 and scales:
            grid = tuple(-(-size // block) for size in array.shape)
            values = np.random.default_rng(1).uniform(1, 2, grid)
            arrays[name + "_scale_inv"] = values.astype(ml_dtypes.bfloat16)
    save_file(arrays, directory / "model.safetensors")
    return open_checkpoint(directory), config


def test_fp8_scales_are_found_and_applied(tmp_path: Path):
    checkpoint, config = fp8_checkpoint(tmp_path, 4)
    names = names_of(spec_from_config(config), checkpoint.names)
    check_names(checkpoint, names)
    source = names.experts[0][1]["down"]
    weight = read_part(checkpoint, source).astype(np.float32)
    scale = read_part(checkpoint, scales_of(checkpoint, names, source).source).astype(np.float32)
    expected = weight * np.kron(scale, np.ones((4, 4), np.float32))[:16, :8]
    np.testing.assert_array_equal(read_source(checkpoint, names, source, np.float32), expected)


def test_fp8_faults(tmp_path: Path):
    checkpoint, config = fp8_checkpoint(tmp_path, 4, scales=False)
    with pytest.raises(
        CheckpointError, match=r"39 missing \(model.layers.0.self_attn.q_proj.weight_scale or _scale_inv, "
    ):
        check_names(checkpoint, names_of(spec_from_config(config), checkpoint.names))
    checkpoint, config = fp8_checkpoint(tmp_path, 4)
    config["quantization_config"]["weight_block_size"] = [8, 8]
    with pytest.raises(CheckpointError, match=r"or \[3, 2\] in blocks of \[8, 8\], got .*_scale_inv' \[6, 4\]; check"):
        check_names(checkpoint, names_of(spec_from_config(config), checkpoint.names))


def test_a_fused_fp8_part_must_start_with_a_block(tmp_path: Path):
    config = CONFIG | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [3, 3]}}
    fused = "model.layers.0.mlp.experts.gate_up_proj"
    checkpoint = saved(tmp_path, {f"{fused}_scale_inv": np.ones((4, 6, 6), np.float32)})
    names = names_of(spec_from_config(config), {fused})
    gate, up = names.experts[0][1]["gate"], names.experts[0][1]["up"]
    assert scales_of(checkpoint, names, gate).source == Source(
        tensor=f"{fused}_scale_inv", shape=(4, 6, 6), expert=1, rows=(0, 3)
    )
    with pytest.raises(ConfigError, match="start at a multiple of 3 rows"):
        scales_of(checkpoint, names, up)


def test_transformers_5_field_names():
    config = CONFIG | {"num_local_experts": 4, "decoder_sparse_step": 2, "mlp_only_layers": []}
    del config["num_experts"]
    names = names_of(spec_from_config(config), frozenset())
    assert names.layer_index == (1,)
    assert names.dense["layers.1.router.weight"].shape == (4, 16)


@pytest.mark.slow  # importing torch
def test_names_are_those_that_transformers_writes(tmp_path: Path):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(**CONFIG)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    names = names_of(spec_from_config(json.loads((tmp_path / "config.json").read_text())), checkpoint.names)
    check_names(checkpoint, names)
