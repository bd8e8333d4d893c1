"""What the configurations of the families mean, and which variants are refused."""

import json
import math

import numpy as np
import pytest

from pallas_kernels.layout import FP4
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.models.families import spec_from_config
from seqmoe_jax.models.rope import Yarn
from seqmoe_jax.presets import preset_path


def preset(name, **changes):
    return json.loads(preset_path(name).read_text()) | changes


def compressed(kind, bits, form, strategy="channel"):
    weights = {"type": kind, "num_bits": bits, "strategy": strategy}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quantization_config": {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gpt-oss-20b", {"attention_bias": False}, "attention_bias False is not supported; supported: True"),
        ("gpt-oss-20b", {"rope_scaling": {"rope_type": "llama3"}}, "rope_type 'llama3' is not supported"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers 24"),
        ("gpt-oss-20b", {"layer_types": ["linear"] * 24}, "supported: 'sliding_attention', 'full_attention'"),
        ("gpt-oss-20b", {"layer_types": [1]}, "'layer_types' must be a list of strings"),
        ("gpt-oss-20b", {"quantization_config": {"quant_method": "awq"}}, "packed 4-bit integers of AWQ"),
        ("qwen3-30b-a3b", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "packed integers of GPTQ"),
        ("qwen3-30b-a3b", {"quantization_config": {"load_in_8bit": True}}, "quant_method 'nothing'"),
        ("qwen3-30b-a3b", {"quantization_config": {"quant_method": "bitsandbytes"}}, "weights of bitsandbytes"),
        ("qwen3-30b-a3b", {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "fmt 'e5m2'"),
        ("qwen3-30b-a3b", compressed("int", 8, "int-quantized"), "int8 weights with scales per channel"),
        ("qwen3-30b-a3b", compressed("int", 8, "mixed-precision"), "int weights of 8 bits"),
        ("qwen3-30b-a3b", compressed("float", 4, "nvfp4-pack-quantized"), "4-bit floats of NVFP4"),
        ("qwen3-30b-a3b", compressed("int", 4, "pack-quantized"), "packed integers"),
        (
            "qwen3-30b-a3b",
            compressed("float", 8, "float-quantized", strategy="tensor_group"),
            "strategy 'tensor_group'",
        ),
        ("qwen3-30b-a3b", {"quantization_config": {"quant_algo": "NVFP4"}}, "quant_algo 'NVFP4' (4-bit floats"),
        ("gpt-oss-20b", {"intermediate_size": 2870}, "intermediate_size 2870"),
        ("mixtral-8x7b", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("mixtral-8x7b", {"sliding_window": 0}, "'sliding_window' must be an integer from 1"),
        ("mixtral-8x7b", {"num_local_experts": 1}, "num_experts_per_tok 2 exceeds num_local_experts 1"),
        ("olmoe-1b-7b", {"attention_bias": True}, "attention_bias True"),
        ("qwen2-57b-a14b", {"use_sliding_window": True}, "use_sliding_window True"),
        ("qwen2-57b-a14b", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ("glm-4.5-air", {"n_group": 3}, "n_group 3 must divide the 128 experts"),
        ("glm-4.5-air", {"n_group": 32, "topk_group": 1}, "hold num_experts_per_tok 8"),
        ("glm-4.5-air", {"first_k_dense_replace": -1}, "'first_k_dense_replace' must be an integer from 0"),
        (
            "glm-4.5-air",
            {"partial_rotary_factor": 1.5},
            "'partial_rotary_factor' must be a number from 0 to 1",
        ),
        ("granite-3.0-3b-a800m", {"attention_bias": True}, "attention_bias True"),
    ],
)
def test_unsupported_variants_are_refused_in_one_line(name, changes, words):
    with pytest.raises(ConfigError) as error:
        spec_from_config(preset(name, **changes))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_gpt_oss_alternates_windows_and_keeps_its_experts_in_fp4():
    spec = spec_from_config(preset("gpt-oss-20b"))
    assert [layer.mixer.sliding_window for layer in spec.layers[:4]] == [128, None, 128, None]
    assert spec.expert_dtype == FP4
    assert spec.moe.activation.limit == 7
    bf16 = spec_from_config(preset("gpt-oss-20b", quantization_config=None))
    assert bf16.expert_layout.block_bytes == 2 * (3 * 2880 * 2880 + 3 * 2880)


def test_yarn_has_the_published_values_of_gpt_oss():
    rope = spec_from_config(preset("gpt-oss-20b")).layers[0].mixer.rope
    assert rope.attention_factor == pytest.approx(1.3465736)
    blend = rope.yarn.blend(rope.theta, rope.rotary_dim)
    low, high = 8.0928, 17.3980
    np.testing.assert_allclose(blend, np.clip((np.arange(32) - low) / (high - low), 0, 1), atol=1e-4)
    plain = rope.theta ** -(np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(rope.inv_freq[:8], plain[:8], rtol=1e-6)
    np.testing.assert_allclose(rope.inv_freq[18:], plain[18:] / 32, rtol=1e-6)


def test_yarn_rounds_the_ends_of_its_blend_outwards():
    blend = Yarn(factor=16.0, original_max_position_embeddings=65536).blend(160000.0, 64)
    assert [int(np.flatnonzero(blend > 0)[0]), int(np.flatnonzero(blend == 1)[0])] == [16, 25]


def test_scalars_of_granite():
    spec = spec_from_config(preset("granite-3.0-3b-a800m"))
    layer = spec.layers[0]
    assert (spec.embedding_scale, spec.logits_scale, layer.residual.scale) == (12, 6, 0.22)
    assert layer.mixer.scale == 0.015625 != layer.mixer.head_dim**-0.5
    assert math.isclose(layer.mixer.rope.theta, 1e4)
