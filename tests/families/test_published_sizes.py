"""Presets have the published sizes: parameters, tensors and bytes of the checkpoint, experts, state of a sequence."""

import json
import math

import ml_dtypes
import numpy as np
import pytest

from seqmoe_jax.checkpoints.names import names_of
from seqmoe_jax.memory.plan import dense_bytes, state_bytes
from seqmoe_jax.models.families import spec_from_config
from seqmoe_jax.presets import preset_path

BF16 = np.dtype(ml_dtypes.bfloat16)

# Parameters (in millions), tensors of the checkpoint, bytes of an expert, of all experts, of the dense part in bf16, of
# the state of a sequence per token and besides.
SIZES = {
    "gpt-oss-20b": (20_915, 459, 13_236_480, 10_165_616_640, 3_595_648_128, 24_576, 3_145_728),
    "gpt-oss-120b": (116_829, 687, 13_236_480, 60_993_699_840, 4_255_115_904, 36_864, 4_718_592),
    "mixtral-8x7b": (46_703, 995, 352_321_536, 90_194_313_216, 3_211_272_192, 131_072, 0),
    "olmoe-1b-7b": (6_919, 3219, 12_582_912, 12_884_901_888, 953_421_824, 131_072, 0),
    "qwen2-57b-a14b": (57_409, 5771, 55_050_240, 98_650_030_080, 16_167_287_808, 57_344, 0),
    "glm-4.5-air": (106_852, 17_925, 34_603_008, 199_313_326_080, 14_391_187_968, 188_416, 0),
    "granite-3.0-3b-a800m": (3_299, 290, 4_718_592, 6_039_797_760, 557_789_184, 65_536, 0),
    "qwen3-30b-a3b": (30_532, 18_867, 9_437_184, 57_982_058_496, 3_082_186_752, 98_304, 0),
    # FP8 experts have scales, and blocks end at a multiple of the rows' lengths.
    "qwen3-30b-a3b-fp8": (30_532, 18_867, 4_724_736, 29_028_777_984, 3_082_186_752, 98_304, 0),
    # Memories of delta nets in float32, and what their convolutions wait for.
    "qwen3.6-35b-a3b": (34_661, 693, 6_291_456, 64_424_509_440, 4_896_723_456, 20_480, 64_880_640),
    "qwen3-next-80b-a3b": (79_674, None, 6_291_456, 154_618_822_656, 4_729_973_760, 24_576, 77_856_768),
    "deepseek-v2-lite": (15_706, 5_291, 17_301_504, 28_789_702_656, 2_623_265_792, 31_104, 0),
    "deepseek-v3": (671_026, None, 44_054_528, 654_121_631_744, 34_235_326_464, 70_272, 0),
    # FP4 experts; windows, and the tokens that compressors wait for.
    "deepseek-v4-flash": (284_332, None, 13_369_344, 147_169_738_752, 14_693_639_260, 6_880, 11_739_136),
}


@pytest.mark.parametrize("name", SIZES)
def test_presets_have_the_published_sizes(name):
    spec = spec_from_config(json.loads(preset_path(name).read_text()))
    parameters, tensors, expert, experts, dense, per_token, besides = SIZES[name]
    moe = spec.moe
    in_expert = 3 * spec.hidden * moe.width + (2 * moe.width + spec.hidden) * moe.bias
    # A table of experts by token is no parameter.
    dense_count = sum(math.prod(tensor.shape) for tensor in spec.tensors().values() if tensor.init != "cycle")
    count = dense_count + spec.num_keys * in_expert
    assert round(count / 1e6) == parameters
    if tensors is not None:  # else it takes a while, and test_published_tensors.py knows more
        # Experts of Granite and Qwen3.6 come fused.
        fused = {f"model.layers.{i}.block_sparse_moe.input_linear.weight" for i in range(len(spec.layers))}
        if name.startswith("qwen3.6"):
            root = "model.language_model."
            fused |= {f"{root}layers.{i}.mlp.experts.gate_up_proj" for i in range(len(spec.layers))}
            fused |= {f"{root}embed_tokens.weight"}
        assert len({source.tensor for source in names_of(spec, fused).sources()}) == tensors
    assert spec.expert_layout.block_bytes == expert
    assert spec.num_keys * spec.expert_layout.block_bytes == experts
    assert dense_bytes(spec, BF16) == dense
    one, two = (state_bytes(spec, 1, tokens, BF16) for tokens in (4096, 8192))
    assert (two - one) // 4096 == per_token
    assert one - 4096 * per_token == besides


@pytest.mark.parametrize(("name", "gigabytes"), [("gpt-oss-20b", 13.76), ("gpt-oss-120b", 65.25)])
def test_gpt_oss_checkpoints_have_the_published_bytes(name, gigabytes):
    spec = spec_from_config(json.loads(preset_path(name).read_text()))
    sources = {source.tensor: source for source in names_of(spec, frozenset()).sources()}
    total = sum(math.prod(source.shape) * (1 if source.packed else 2) for source in sources.values())
    assert round(total / 1e9, 2) == gigabytes
