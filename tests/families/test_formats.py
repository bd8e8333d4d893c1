"""FP8 in every form that people publish is read as what it means, and stays FP8 where a kernel has that form."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from checkpoints import NEW, PROMPT
from published_fp8 import FORMATS, publish, write
from safetensors.torch import load_file, save_file

from pallas_kernels.fused_moe.swiglu import unpack_weight
from pallas_kernels.layout import FP8
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.errors import CheckpointError, ConfigError
from seqmoe_jax.loading import load_model
from seqmoe_jax.models.families import spec_from_config
from seqmoe_jax.options import EngineOptions

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
# Several blocks, the last ones ragged, in both directions.
SIZES = {"hidden_size": 160, "moe_intermediate_size": 144, "head_dim": 32, "num_experts": 8}
HELD = {"small blocks": (F32, None), "compressed-tensors by group": (F32, None)}
HELD |= dict.fromkeys(("compressed-tensors by channel", "fbgemm"), (FP8, "channel"))


# What stays bfloat16, and what the log says of it.
LEFT = {
    r"layers\.1\.mlp\.experts": "experts of layer 1 are bfloat16",
    r"layers\.0\.mlp\.experts\.(3|5)\.": "experts of layer 0 (3, 5 of 8) are bfloat16",
    r"layers\.1\.mlp\.experts\.2\.up_proj": "experts of layer 1 (2 of 8) are bfloat16",
    r"self_attn": None,
    r"experts": None,
}


def check_weights(directory):
    """Everything is what `meant` says, to the bit; returns the layout of experts."""
    model, meant = load_model(directory)[0], load_file(directory / "meant" / "model.safetensors")
    layout = model.spec.expert_layout
    for layer, pool in enumerate(model.pools):
        for expert, block in enumerate(np.asarray(pool)):
            for name in ("gate", "up", "down"):
                value = np.asarray(unpack_weight(jnp.asarray(block), layout, name))
                expected = meant[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"]
                np.testing.assert_array_equal(value, expected.numpy())
        output = model.weights.layers[layer].mixer.o
        np.testing.assert_array_equal(output, meant[f"model.layers.{layer}.self_attn.o_proj.weight"].numpy())
    return layout


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_what_the_format_means(name, tmp_path, caplog):
    write(tmp_path, FORMATS[name], **SIZES)
    layout = check_weights(tmp_path)
    assert (layout.dtype, layout.scales) == HELD.get(name, (FP8, "block"))
    lines = [line for line in caplog.messages if "activations are not quantised" in line]
    assert len(lines) == 1
    assert ("scales of activations are not applied" in lines[0]) == (FORMATS[name].activations is not None)


@pytest.mark.parametrize(("left", "words"), LEFT.items())
@pytest.mark.parametrize("name", ["fp8 by block", "compressed-tensors by channel", "modelopt"])
def test_what_is_left_as_it_is_keeps_its_values_and_so_does_the_rest(name, left, words, tmp_path, caplog):
    write(tmp_path, FORMATS[name], left=left, **SIZES)
    layout, kind = check_weights(tmp_path), "channel" if "channel" in name else "block"
    expected = (FP8, kind) if left == "self_attn" else (BF16, None if left == "experts" else kind)
    assert (layout.dtype, layout.scales) == expected
    assert words is None or words in caplog.text


FUSED = ["fp8 by block", "fp8 by tensor, fused", "compressed-tensors by channel"]


@pytest.mark.parametrize("name", FUSED)
def test_experts_may_be_fused_as_transformers_saves_them(name, tmp_path):
    form = FORMATS[name.removesuffix(", fused")]
    write(tmp_path, form, **SIZES | {"moe_intermediate_size": 128})
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts."
        for end, theirs in (("weight", ""), (f"weight{form.suffix}", form.suffix)):
            parts = {
                kind: [tensors.pop(f"{at}{expert}.{kind}_proj.{end}") for expert in range(SIZES["num_experts"])]
                for kind in ("gate", "up", "down")
            }
            by_tensor = parts["gate"][0].ndim < 2
            if by_tensor:  # both halves share one
                parts = {kind: [part.reshape(1, 1) for part in of_kind] for kind, of_kind in parts.items()}
            raw = {kind: torch.stack(of_kind).view(torch.uint8) for kind, of_kind in parts.items()}
            dtype = parts["gate"][0].dtype
            both = raw["gate"] if by_tensor else torch.cat([raw["gate"], raw["up"]], 1)
            tensors |= {
                f"{at}gate_up_proj{theirs}": both.view(dtype),
                f"{at}down_proj{theirs}": raw["down"].view(dtype),
            }
    tensors = {key: tensor for key, tensor in tensors.items() if "input_scale" not in key}
    save_file(tensors, path, {"format": "pt"})
    if "by tensor" in name:
        meant = load_file(tmp_path / "meant" / "model.safetensors")
        for layer, expert in np.ndindex(2, SIZES["num_experts"]):
            at = f"model.layers.{layer}.mlp.experts."
            scale = tensors[f"{at}gate_up_proj{form.suffix}"][expert]
            values = tensors[f"{at}gate_up_proj"][expert][128:].float()
            meant[f"{at}{expert}.up_proj.weight"] = values * scale
        save_file(meant, tmp_path / "meant" / "model.safetensors", {"format": "pt"})
    check_weights(tmp_path)


def test_files_are_believed_where_the_config_says_nothing(tmp_path):
    write(tmp_path, FORMATS["modelopt"], **SIZES)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert check_weights(tmp_path).dtype == FP8


def tokens(directory, **options):
    engine = TokenEngine(load_model(directory)[0], EngineOptions(**options))
    new = [event.token for event in engine.run([PROMPT], max_new_tokens=NEW)]
    return new, engine.last_stats.hit_rate


SAMPLED = [("compressed-tensors by channel", None), ("fp8 by block", next(iter(LEFT)))]
ALL = [(name, None) for name in FORMATS] + [(SAMPLED[0][0], left) for left in LEFT]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in SAMPLED]


@pytest.mark.parametrize(("name", "left"), SAMPLED + SLOW)
def test_tokens_are_those_of_the_dequantised_weights(name, left, tmp_path):
    reference = publish(tmp_path, FORMATS[name], left=left or "$^", **SIZES)
    new, hit_rate = tokens(tmp_path, policy="lru", residency=0.45)
    assert new == reference.tokens[len(PROMPT) :]
    assert hit_rate < 1


@pytest.mark.slow  # every residency is a compilation
@pytest.mark.parametrize(("name", "left"), SAMPLED)
def test_tokens_are_the_same_at_every_residency(name, left, tmp_path):
    reference = publish(tmp_path, FORMATS[name], left=left or "$^", **SIZES)
    for options in ({"policy": "full"}, {"residency": "least"}, {"residency": 0.75, "policy": "seqmoe"}):
        assert tokens(tmp_path, **options)[0] == reference.tokens[len(PROMPT) :]


# By what a config leaves unquantised: the dtype and scales of experts that planning counts with.
UNQUANTISED = [
    (["lm_head", "model.layers.0.mlp.gate", "model.layers.0.input_layernorm"], FP8, "block"),
    (["lm_head", "model.layers.1.mlp.experts"], BF16, "block"),
    (["model.layers.1"], BF16, "block"),
    (["model.layers.0.mlp.experts.7.down_proj"], BF16, "block"),
    (["model.language_model.layers.0.mlp.experts.7"], BF16, "block"),
    (["re:.*layers\\.1\\..*"], BF16, "block"),
    (["re:.*mlp.gate$", "re:.*self_attn.*"], FP8, "block"),
    (["model.layers.*.mlp.experts*"], BF16, None),
    (["re:.*mlp.experts.*"], BF16, None),
    (["mlp.experts"], BF16, None),
    (["re:(a+)+$"], FP8, "block"),  # no expression of a file is run
]


@pytest.mark.parametrize(("ignored", "dtype", "scales"), UNQUANTISED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("field", ["modules_to_not_convert", "ignored_layers"])
def test_planning_knows_of_experts_that_the_config_leaves(field, ignored, dtype, scales, tmp_path):
    config = {
        **{"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32},
        **{
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
        },
        **{"num_experts_per_tok": 2, "vocab_size": 64, "max_position_embeddings": 64, "torch_dtype": "bfloat16"},
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], field: ignored},
    }
    layout = spec_from_config(config).expert_layout
    assert (layout.dtype, layout.scales) == (dtype, scales)


def test_scales_that_are_missing_or_of_another_shape_are_named(tmp_path):
    write(tmp_path, FORMATS["compressed-tensors by channel"], **SIZES)
    path, tensors = tmp_path / "model.safetensors", load_file(tmp_path / "model.safetensors")
    scale = "model.layers.1.mlp.experts.2.down_proj.weight_scale"
    save_file(tensors | {scale: tensors[scale][:7].clone()}, path, {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"one for each row, or \[2, 2\] in blocks of \[128, 128\], got .*\[7, 1\]"
    ):
        load_model(tmp_path)
    del tensors[scale]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 missing \(.*experts.2.down_proj.weight_scale or _scale_inv\)"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("up_proj.weight", torch.int8, r"of a wrong shape or dtype \(.* of int8\); int8 weights with scales"),
        ("up_proj.qweight", torch.int32, r"packed integers \(GPTQ or AWQ\) are not supported"),
        ("up_proj.weight_packed", torch.uint8, "packed integers of compressed-tensors are not supported"),
    ],
)
def test_weights_of_other_formats_are_named_whatever_the_config_says(name, dtype, words, tmp_path):
    write(tmp_path, FORMATS["fp8 by block"], left=".", **SIZES)
    tensors = load_file(tmp_path / "model.safetensors")
    old = "model.layers.0.mlp.experts.0.up_proj.weight"
    tensors[old.replace("up_proj.weight", name)] = tensors.pop(old).to(dtype)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=words):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model-Q4_K_M.gguf", "model-Q4_K_M.gguf (GGUF); take the safetensors checkpoint"),
        ("pytorch_model.bin", "pytorch_model.bin (pickled weights, which may run code"),
        ("adapter_model.safetensors", "merge it into its model with peft"),
        ("consolidated.safetensors", "take the same model's files for transformers"),
        ("model-00001-of-00002.safetensors", "download model.safetensors.index.json too"),
    ],
)
@pytest.mark.parametrize("config", [True, False])
def test_files_that_are_not_read_are_named(file, words, config, tmp_path):
    (tmp_path / file).write_bytes(b"")
    if config:
        write(tmp_path / "other", FORMATS["fp8 by block"], **SIZES)
        (tmp_path / "config.json").write_bytes((tmp_path / "other" / "config.json").read_bytes())
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        load_model(tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
