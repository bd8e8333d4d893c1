"""The name maps know every tensor of published checkpoints, by name, shape and dtype."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from seqmoe_jax.checkpoints.check import check_names
from seqmoe_jax.checkpoints.names import names_of
from seqmoe_jax.checkpoints.safetensors import Checkpoint
from seqmoe_jax.errors import CheckpointError
from seqmoe_jax.models.families import spec_from_config
from seqmoe_jax.presets import preset_path

BF16, FP8, E8M0 = (np.dtype(kind) for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu))
F32, I64, I8 = np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.int8)


def spec_of(preset):
    return spec_from_config(json.loads(preset_path(preset).read_text()))


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


def fp8(name, rows, cols):
    """A DeepSeek-V4 weight with a power of two for each 128 x 128 block."""
    grid = (math.ceil(rows / 128), math.ceil(cols / 128))
    return {f"{name}.weight": (FP8, (rows, cols)), f"{name}.scale": (E8M0, grid)}


def fp4(name, rows, cols):
    """A DeepSeek-V4 expert's matrix: two numbers in a byte, a power of two for 32 columns."""
    return {f"{name}.weight": (I8, (rows, cols // 2)), f"{name}.scale": (E8M0, (rows, cols // 32))}


def v4_block(at, *, ratio, hashed=False):
    """The published tensors of one layer of DeepSeek-V4-Flash."""
    tensors = {f"{at}attn_norm.weight": (BF16, (4096,)), f"{at}ffn_norm.weight": (BF16, (4096,))}
    for half in ("attn", "ffn"):
        tensors |= {f"{at}hc_{half}_fn": (F32, (24, 16384)), f"{at}hc_{half}_base": (F32, (24,))}
        tensors[f"{at}hc_{half}_scale"] = (F32, (3,))
    a, f = f"{at}attn.", f"{at}ffn."
    tensors |= {
        f"{a}attn_sink": (F32, (64,)),
        f"{a}q_norm.weight": (BF16, (1024,)),
        f"{a}kv_norm.weight": (BF16, (512,)),
    }
    tensors |= fp8(f"{a}wq_a", 1024, 4096) | fp8(f"{a}wq_b", 32768, 1024) | fp8(f"{a}wkv", 512, 4096)
    tensors |= fp8(f"{a}wo_a", 8192, 4096) | fp8(f"{a}wo_b", 4096, 8192)

    def compressor(at, width, dim):
        projections = {f"{at}{name}.weight": (BF16, (width, 4096)) for name in ("wkv", "wgate")}
        return projections | {f"{at}ape": (F32, (ratio, width)), f"{at}norm.weight": (BF16, (dim,))}

    if ratio:
        tensors |= compressor(f"{a}compressor.", 1024 if ratio == 4 else 512, 512)
    if ratio == 4:
        tensors |= compressor(f"{a}indexer.compressor.", 256, 128) | fp8(f"{a}indexer.wq_b", 8192, 1024)
        tensors[f"{a}indexer.weights_proj.weight"] = (BF16, (64, 4096))
    tensors[f"{f}gate.weight"] = (BF16, (256, 4096))
    if hashed:
        tensors[f"{f}gate.tid2eid"] = (I64, (129280, 6))
    else:
        tensors[f"{f}gate.bias"] = (F32, (256,))
    parts = {"w1": (2048, 4096), "w3": (2048, 4096), "w2": (4096, 2048)}
    for name, shape in parts.items():
        tensors |= fp8(f"{f}shared_experts.{name}", *shape)
        for expert in range(256):
            tensors |= fp4(f"{f}experts.{expert}.{name}", *shape)
    return tensors


def v4_head(at):
    return {f"{at}hc_head_fn": (F32, (4, 16384)), f"{at}hc_head_base": (F32, (4,)), f"{at}hc_head_scale": (F32, (1,))}


def v4_flash():
    tensors = dict.fromkeys(("embed.weight", "head.weight"), (BF16, (129280, 4096)))
    tensors |= {"norm.weight": (BF16, (4096,))} | v4_head("")
    for layer in range(43):
        ratio = 0 if layer < 2 else (128 if layer % 2 else 4)
        tensors |= v4_block(f"layers.{layer}.", ratio=ratio, hashed=layer < 3)
    tensors |= v4_block("mtp.0.", ratio=0) | v4_head("mtp.0.")
    tensors |= fp8("mtp.0.e_proj", 4096, 4096) | fp8("mtp.0.h_proj", 4096, 4096)
    return tensors | {f"mtp.0.{name}.weight": (BF16, (4096,)) for name in ("enorm", "hnorm", "norm")}


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


PUBLISHED = {"deepseek-v4-flash": v4_flash, "deepseek-v3": v3, "qwen3.6-35b-a3b": qwen36}


@pytest.mark.parametrize(("preset", "tensors"), PUBLISHED.items())
def test_every_published_tensor_has_its_place(preset, tensors):
    published = Published(tensors())
    if preset == "deepseek-v4-flash":
        assert len(published.names) == 69_187
        assert published.size() == pytest.approx(159.6e9, rel=5e-4)
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
