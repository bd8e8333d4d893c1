"""Writes a checkpoint of Qwen3-MoE's shape with random weights: `config.json`, an index and shards.

python -m scripts.checks.random_checkpoint DIR --layers 8 --experts 128 --hidden 2048 --width 768 --dtype fp8
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from seqmoe_jax.checkpoints.fp8 import FP8, scale_shape
from seqmoe_jax.checkpoints.names import names_of
from seqmoe_jax.checkpoints.safetensors import INDEX, SINGLE
from seqmoe_jax.models.families import spec_from_config

BF16 = np.dtype(ml_dtypes.bfloat16)
Entry = tuple[str, np.dtype, tuple[int, ...]]  # name, dtype, shape


def make_config(
    *,
    layers: int,
    experts: int,
    top_k: int,
    hidden: int,
    width: int,
    dtype: str = "bf16",
    vocab: int = 1024,
    block: int = 128,
) -> dict[str, Any]:
    """A `config.json` with heads of 64 and one key/value head per four query heads."""
    heads = max(4, hidden // 64)
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * width,
        "moe_intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": 64,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        "eos_token_id": 0,
    }
    if dtype == "fp8":
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    if dtype == "fp8-channel":
        weights = {"type": "float", "num_bits": 8, "strategy": "channel"}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }
    return config


def entries(config: Mapping[str, Any]) -> Iterator[Entry]:
    """Every tensor of the checkpoint. Where the config says FP8, all but embedding, head and router are."""
    names = names_of(spec_from_config(config), frozenset())
    for source in names.sources():
        fp8 = "quantization_config" in config and source.tensor.endswith("_proj.weight")
        yield source.tensor, FP8 if fp8 else BF16, source.shape
        if fp8:
            channel = config["quantization_config"]["quant_method"] != "fp8"
            block = (1, source.shape[-1]) if channel else names.block
            yield source.tensor + ("_scale" if channel else "_scale_inv"), BF16, scale_shape(source.shape, block)


def write_checkpoint(directory: Path, config: Mapping[str, Any], *, shard_size: int = 10**9, seed: int = 0) -> int:
    """Writes the directory and returns the bytes of weights. One shard (bytes) is in memory at a time."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shards: list[list[Entry]] = [[]]
    size = total = 0
    for entry in sorted(entries(config), key=lambda entry: entry[0]):
        nbytes = math.prod(entry[2]) * entry[1].itemsize
        if shards[-1] and size + nbytes > shard_size:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size, total = size + nbytes, total + nbytes
    rng = np.random.default_rng(seed)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({entry[0]: _random(*entry, rng) for entry in shard}, directory / name, {"format": "pt"})
        weight_map.update({entry[0]: name for entry in shard})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total


def _random(name: str, dtype: np.dtype, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if name.endswith("norm.weight"):
        return np.ones(shape, dtype)
    if name.endswith(("_scale_inv", "_scale")):
        # The e4m3 values have a deviation of 100, the weights one of 1 / sqrt(columns), at least if these are 128.
        return (rng.uniform(0.8, 1.25, shape) / (100 * math.sqrt(shape[-1] * 128))).astype(dtype)
    # Drawing billions of normals would take minutes: a large tensor repeats its own million of them.
    size, deviation = math.prod(shape), 100.0 if dtype == FP8 else shape[-1] ** -0.5
    normal = rng.standard_normal(min(size, 1 << 20), np.float32).clip(-4.4, 4.4)  # times 100 is still inside e4m3
    return np.resize((normal * np.float32(deviation)).astype(dtype), shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    for name, default in (("layers", 4), ("experts", 16), ("top-k", 4), ("hidden", 256), ("width", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--dtype", choices=("bf16", "fp8", "fp8-channel"), default="bf16")
    parser.add_argument("--block", type=int, default=128, help="rows and columns per FP8 scale")
    parser.add_argument("--shard-size", type=int, default=10**9, help="bytes")
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args())
    directory, shard_size, seed = args.pop("directory"), args.pop("shard_size"), args.pop("seed")
    total = write_checkpoint(directory, make_config(**args), shard_size=shard_size, seed=seed)
    print(json.dumps({"directory": str(directory), "bytes": total}))


if __name__ == "__main__":
    main()
