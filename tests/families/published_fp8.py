"""Checkpoints in the FP8 formats that people publish, and what their tensors mean, which transformers runs in float32.

Values come from the definition of each format, in NumPy: `w[i, j] = q[i, j] * scale`, the scale that of the matrix, of
row i, or of the block that holds (i, j).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from checkpoints import FAMILIES, Reference, random_model, run
from safetensors.torch import load_file, save_file

E4M3 = ml_dtypes.float8_e4m3fn
# What these formats quantise of a model: every projection, not the router, the norms and the head.
PROJECTIONS = re.compile(r"(_proj|\.w[123]|linear)\.weight$|experts\.(gate_up_proj|down_proj)$")


@dataclass(frozen=True, kw_only=True)
class Format:
    """`block`: rows and columns of a scale, None for all. `shape` is what the file makes of the grid of scales."""

    block: tuple[int | None, int | None]
    config: Mapping[str, Any]
    suffix: str = "_scale"
    shape: Callable[[np.ndarray], np.ndarray] = lambda grid: grid
    dtype: torch.dtype = torch.float32
    activations: str | None = None  # the end of names of their scales, where the file has such


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    weights = {"type": "float", "num_bits": 8, "strategy": strategy, "symmetric": True, "dynamic": False} | weights
    inputs = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
FORMATS = {
    "fp8 by block": Format(
        block=(128, 128), suffix="_scale_inv", config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    ),
    "fp8 by tensor": Format(block=(None, None), config=STATIC, shape=lambda grid: grid[0], activations=".input_scale"),
    "fp8 by tensor, as transformers has it": Format(
        block=(None, None), suffix="_scale_inv", shape=lambda grid: grid.reshape(()), activations=".activation_scale",
        config=STATIC | {"weight_block_size": None}, dtype=torch.bfloat16,
    ),
    "compressed-tensors by tensor": Format(
        block=(None, None), config=compressed("tensor"), shape=lambda grid: grid[0], activations=".input_scale",
        dtype=torch.bfloat16,
    ),
    "compressed-tensors by channel": Format(block=(1, None), config=compressed("channel"), dtype=torch.bfloat16),
    "compressed-tensors by block": Format(block=(128, 128), config=compressed("block", block_structure=[128, 128])),
    "compressed-tensors by group": Format(block=(1, 32), config=compressed("group", group_size=32)),
    "modelopt": Format(
        block=(None, None), config={"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        shape=lambda grid: grid.reshape(()), activations=".input_scale",
    ),
    "fbgemm": Format(
        block=(1, None), config={"quant_method": "fbgemm_fp8"}, shape=lambda grid: grid[:, 0],
        activations=".input_scale_ub",
    ),
    "small blocks": Format(
        block=(32, 16), suffix="_scale_inv", config={"quant_method": "fp8", "weight_block_size": [32, 16]}
    ),
}  # fmt: skip


def quantise(weight: np.ndarray, block: tuple[int | None, int | None]) -> tuple[np.ndarray, np.ndarray]:
    """[..., rows, columns] -> e4m3 of the same shape, and the grid of scales."""
    rows, cols = weight.shape
    height, width = block[0] or rows, block[1] or cols
    grid = np.zeros((math.ceil(rows / height), math.ceil(cols / width)), np.float32)
    for i, j in np.ndindex(grid.shape):
        part = weight[i * height : (i + 1) * height, j * width : (j + 1) * width]
        grid[i, j] = np.float32(np.abs(part).max() / 448).astype(ml_dtypes.bfloat16)
    return (weight / spread(grid, (height, width), weight.shape)).clip(-448, 448).astype(E4M3), grid


def spread(grid: np.ndarray, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    rows, cols = np.indices(shape)
    return grid[rows // block[0], cols // block[1]]


def publish(directory: Path, form: Format, *, left: str = "$^", **sizes: Any) -> Reference:
    """Writes a checkpoint of the format, in which what `left` matches is bfloat16, and runs what it means."""
    write(directory, form, left=left, **sizes)
    reference = run(FAMILIES["qwen3_moe"][0], directory / "meant")
    return Reference(directory=directory, tokens=reference.tokens, logits=reference.logits)


def write(directory: Path, form: Format, *, family: str = "qwen3_moe", left: str = "$^", **sizes: Any) -> None:
    """The checkpoint, and in `meant` what its tensors mean, in float32."""
    model = random_model(family, **sizes)
    plain = directory / "meant"
    model.save_pretrained(plain)
    stored, meant = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        meant[name], stored[name] = tensor.float(), tensor
        if not PROJECTIONS.search(name) or re.search(left, name):
            continue
        weight = tensor.float().numpy()
        values, grid = quantise(weight, form.block)
        block = (form.block[0] or weight.shape[0], form.block[1] or weight.shape[1])
        meant[name] = torch.from_numpy(values.astype(np.float32) * spread(grid, block, weight.shape))
        stored[name] = torch.from_numpy(values.view(np.uint8)).view(torch.float8_e4m3fn)
        stored[name + form.suffix] = torch.from_numpy(np.array(form.shape(grid), np.float32)).to(form.dtype)
        if form.activations:
            stored[name.removesuffix(".weight") + form.activations] = torch.tensor(0.5)
    config = json.loads((plain / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": dict(form.config)}))
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
