"""A tiny DeepSeek-V4 in the layout and names in which the model is published: FP8 and FP4 with powers of two."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import torch
from checkpoints import COMMON, FAMILIES, Reference, make, run, to_mxfp4
from safetensors.torch import load_file, save_file

BLOCK = (24, 40)  # rows and columns that share a scale; the last ones are ragged
NAMES = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
)
FP8 = re.compile(r"\.attn\.w\w+\.weight$|\.indexer\.wq_b\.weight$|\.shared_experts\.")
FLOAT32 = re.compile(r"(_fn|_base|_scale|\.ape|\.attn_sink|\.gate\.bias)$")


def make_v4(directory: Path) -> Reference:
    """The reference runs on what the stored values mean, which is exact in bfloat16."""
    plain = directory / "dequantised"
    make("deepseek_v4", plain)
    meant = load_file(plain / "model.safetensors")
    published = {"mtp.0.norm.weight": torch.ones(4)}
    for saved, tensor in meant.items():
        name = saved
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        scale = name.removesuffix("weight") + "scale"
        if ".experts." in name:
            codes, exponents, value = to_mxfp4(tensor)
            published[name] = codes.flatten(-2).view(torch.int8)
            published[scale] = exponents.view(torch.float8_e8m0fnu)
            meant[saved] = value.bfloat16()
        elif FP8.search(name):
            published[name], published[scale], value = to_fp8(tensor)
            meant[saved] = value.bfloat16()
        else:
            published[name] = tensor.float() if FLOAT32.search(name) else tensor
    save_file(published, directory / "model.safetensors")
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    config = COMMON | FAMILIES["deepseek_v4"][1] | {
        "model_type": "deepseek_v4",
        "compress_ratios": [0, 4, 128, 0],  # the last is of what predicts further tokens
        "expert_dtype": "fp4",
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": BLOCK},
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    reference = run("DeepseekV4", plain)
    return Reference(directory=directory, tokens=reference.tokens, logits=reference.logits)


def to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[rows, columns] -> values, exponents, what they mean."""
    rows, cols = weight.shape
    grid = (math.ceil(rows / BLOCK[0]), math.ceil(cols / BLOCK[1]))
    scale, values = torch.zeros(grid), torch.zeros(rows, cols, dtype=torch.float8_e4m3fn)
    meant = torch.zeros(rows, cols)
    for i in range(grid[0]):
        for j in range(grid[1]):
            block = (slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1]))
            scale[i, j] = 2 ** torch.ceil(torch.log2(weight[block].float().abs().max() / 448))
            values[block] = (weight[block].float() / scale[i, j]).to(torch.float8_e4m3fn)
            meant[block] = values[block].float() * scale[i, j]
    return values, scale.to(torch.float8_e8m0fnu), meant
