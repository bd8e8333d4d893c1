"""Presets have the sizes of the published models, and the name maps know every tensor of their checkpoints."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from seqmoe_jax.checkpoints.names import check_names, names_of
from seqmoe_jax.checkpoints.safetensors import Checkpoint
from seqmoe_jax.errors import CheckpointError
from seqmoe_jax.models.families import spec_from_config
from seqmoe_jax.planning import state_bytes
from seqmoe_jax.presets import preset_names, preset_path

BF16, FP8, E8M0 = (np.dtype(kind) for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu))
F32, I64, I8 = np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.int8)


def spec_of(preset):
    return spec_from_config(json.loads(preset_path(preset).read_text()))


def parameters(spec):
    """Weights in all, scales not counted."""
    dense = sum(math.prod(tensor.shape) for name, tensor in spec.tensors().items() if not name.endswith("table"))
    return dense + spec.num_keys * 3 * spec.hidden * spec.moe.width


# preset: (weights, bytes of an expert's block, experts, state bytes per token in bfloat16 and beside that)
SIZES = {
    "qwen3-30b-a3b": (30_532_122_624, 9_437_184, 6144, 98_304, 0),
    "qwen3-30b-a3b-fp8": (30_532_122_624, 4_724_736, 6144, 98_304, 0),
    # Delta nets: 30 layers of a 32 x 128 x 128 memory in float32 and four inputs of 8192 channels.
    "qwen3.6-35b-a3b": (34_660_610_688, 6_291_456, 10_240, 20_480, 30 * (4 * 32 * 128 * 128 + 2 * 4 * 8192)),
    "qwen3-next-80b-a3b": (79_674_391_296, 6_291_456, 24_576, 24_576, 36 * (4 * 32 * 128 * 128 + 2 * 4 * 8192)),
    "deepseek-v2-lite": (15_706_484_224, 17_301_504, 26 * 64, 27 * 2 * (512 + 64), 0),
    "deepseek-v3": (671_026_419_200, 44_054_528, 58 * 256, 61 * 2 * (512 + 64), 0),
}


@pytest.mark.parametrize("preset", SIZES)
def test_sizes(preset):
    weights, expert, experts, per_token, fixed = SIZES[preset]
    spec = spec_of(preset)
    assert parameters(spec) == weights
    assert spec.expert_layout.block_bytes == expert
    assert spec.num_keys == experts
    short, long = (state_bytes(spec, 1, context, BF16) for context in (4096, 8192))
    assert (long - short) // 4096 == per_token
    assert short - 4096 * per_token == fixed


def test_every_preset_is_a_model_that_is_understood():
    for name in preset_names():
        assert spec_of(name).num_keys > 0


class Published(Checkpoint):
    """A checkpoint that has nothing but its list of tensors: name -> (dtype, shape)."""

    def __init__(self, tensors):
        self.tensors, self.directory = tensors, Path("published")

    @property
    def names(self):
        return self.tensors.keys()

    def info(self, name):
        dtype, shape = self.tensors[name]
        return SimpleNamespace(dtype=dtype, shape=shape)

    def size(self, which=lambda name: True):
        return sum(math.prod(shape) * dtype.itemsize for name, (dtype, shape) in self.tensors.items() if which(name))


def qwen36():
    """The published tensors of Qwen3.6-35B-A3B, but of the tower and the predicting layer one each."""
    at, bf16 = "model.language_model.", {
        "embed_tokens.weight": (248320, 2048),
        "norm.weight": (2048,),
    }  # fmt: skip
    f32 = {}
    for layer in range(40):
        l = f"layers.{layer}."  # noqa: E741
        bf16 |= {f"{l}{name}_layernorm.weight": (2048,) for name in ("input", "post_attention")}
        if layer % 4 == 3:
            rows = {"q": (8192, 2048), "k": (512, 2048), "v": (512, 2048), "o": (2048, 4096)}
            bf16 |= {f"{l}self_attn.{name}_proj.weight": shape for name, shape in rows.items()}
            bf16 |= {f"{l}self_attn.{name}_norm.weight": (256,) for name in "qk"}
        else:
            rows = {"qkv": 8192, "z": 4096, "a": 32, "b": 32}
            bf16 |= {f"{l}linear_attn.in_proj_{name}.weight": (size, 2048) for name, size in rows.items()}
            bf16 |= {f"{l}linear_attn.out_proj.weight": (2048, 4096), f"{l}linear_attn.conv1d.weight": (8192, 1, 4)}
            bf16[f"{l}linear_attn.dt_bias"] = (32,)
            f32 |= {f"{l}linear_attn.A_log": (32,), f"{l}linear_attn.norm.weight": (128,)}
        bf16 |= {f"{l}mlp.gate.weight": (256, 2048), f"{l}mlp.shared_expert_gate.weight": (1, 2048)}
        bf16 |= {f"{l}mlp.experts.gate_up_proj": (256, 1024, 2048), f"{l}mlp.experts.down_proj": (256, 2048, 512)}
        bf16 |= {f"{l}mlp.shared_expert.{name}_proj.weight": (512, 2048) for name in ("gate", "up")}
        bf16[f"{l}mlp.shared_expert.down_proj.weight"] = (2048, 512)
    tensors = {at + name: (BF16, shape) for name, shape in bf16.items()}
    tensors |= {at + name: (F32, shape) for name, shape in f32.items()} | {"lm_head.weight": (BF16, (248320, 2048))}
    return tensors | {"mtp.fc.weight": (BF16, (2048, 4096)), "model.visual.pos_embed.weight": (BF16, (2304, 1152))}


def v3():
    """The published tensors of DeepSeek-V3: FP8 with float32 scales, some blocks ragged; of layer 61 one tensor."""
    tensors = {f"{name}.weight": (BF16, (129280, 7168)) for name in ("model.embed_tokens", "lm_head")}
    tensors |= {"model.norm.weight": (BF16, (7168,)), "model.layers.61.enorm.weight": (BF16, (7168,))}

    def fp8(name, rows, cols):
        grid = (math.ceil(rows / 128), math.ceil(cols / 128))
        return {f"{name}.weight": (FP8, (rows, cols)), f"{name}.weight_scale_inv": (F32, grid)}

    def mlp(at, width):
        parts = {"gate": (width, 7168), "up": (width, 7168), "down": (7168, width)}
        return {
            name: value for part, shape in parts.items() for name, value in fp8(f"{at}.{part}_proj", *shape).items()
        }

    for layer in range(61):
        at = f"model.layers.{layer}."
        norms = {"input_layernorm": 7168, "post_attention_layernorm": 7168}
        norms |= {"self_attn.q_a_layernorm": 1536, "self_attn.kv_a_layernorm": 512}
        tensors |= {f"{at}{name}.weight": (BF16, (size,)) for name, size in norms.items()}
        shapes = {"q_a_proj": (1536, 7168), "q_b_proj": (24576, 1536), "kv_a_proj_with_mqa": (576, 7168)}
        shapes |= {"kv_b_proj": (32768, 512), "o_proj": (7168, 16384)}
        for name, shape in shapes.items():
            tensors |= fp8(f"{at}self_attn.{name}", *shape)
        if layer < 3:
            tensors |= mlp(f"{at}mlp", 18432)
            continue
        tensors |= {f"{at}mlp.gate.weight": (BF16, (256, 7168)), f"{at}mlp.gate.e_score_correction_bias": (F32, (256,))}
        tensors |= mlp(f"{at}mlp.shared_experts", 2048)
        for expert in range(256):
            tensors |= mlp(f"{at}mlp.experts.{expert}", 2048)
    return tensors


PUBLISHED = {"deepseek-v3": v3, "qwen3.6-35b-a3b": qwen36}


@pytest.mark.parametrize(("preset", "tensors"), PUBLISHED.items())
def test_every_published_tensor_has_its_place(preset, tensors):
    published = Published(tensors())
    if preset == "qwen3.6-35b-a3b":
        text = published.size(lambda name: not name.startswith(("mtp.", "model.visual.")))
        assert text == pytest.approx(69.3e9, rel=5e-4)
    # All kinds of layers are among the first five; tens of thousands of experts would take a while.
    spec = spec_of(preset)
    spec = replace(spec, layers=spec.layers[:5])
    for name in list(published.tensors):
        match = re.search(r"layers\.(\d+)\.", name)
        if match and 5 <= int(match[1]) < 61:
            del published.tensors[name]
        elif match and match[1] == "61":  # what stands behind the last layer
            published.tensors[name.replace("61", "5")] = published.tensors.pop(name)
    names = names_of(spec, published.names)
    check_names(published, names)
    missing = next(name for name in sorted(published.names) if name.endswith(("wkv.weight", "o_proj.weight")))
    del published.tensors[missing]
    with pytest.raises(CheckpointError, match=missing):
        check_names(published, names)
