"""Writes a Qwen3-MoE-shaped checkpoint with random weights: config.json, index and shards, in little memory.

python scripts/make_random_checkpoint.py DIR --layers 8 --experts 128 --hidden 2048 --width 768 --dtype fp8
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from seqmoe_jax.checkpoints.fp8 import FP8, scale_shape
from seqmoe_jax.checkpoints.names import names_of
from seqmoe_jax.checkpoints.safetensors import INDEX, SINGLE
from seqmoe_jax.models.families import spec_from_config

CODES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": FP8, "F32": np.dtype(np.float32)}
UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
Entry = tuple[str, str, tuple[int, ...]]  # name, dtype code, shape


def make_config(
    *,
    layers: int,
    experts: int,
    top_k: int,
    hidden: int,
    width: int,
    dtype: str = "bf16",
    vocab: int = 1024,
    heads: int | None = None,
    block: int = 128,
) -> dict[str, Any]:
    """A `config.json` with heads of 64 and one key/value head per four query heads."""
    heads = heads or max(4, hidden // 64)
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
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    if dtype == "fp8":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [block, block],
        }
    return config


def entries(config: Mapping[str, Any]) -> Iterator[Entry]:
    """Every tensor of the checkpoint. Where the config says FP8, all but embedding, head and router are."""
    names = names_of(spec_from_config(config), frozenset())
    quantized = "quantization_config" in config
    for source in names.sources():
        fp8 = quantized and source.tensor.endswith("_proj.weight")
        yield source.tensor, "F8_E4M3" if fp8 else "BF16", source.shape
        if fp8:
            yield source.tensor + "_scale_inv", "BF16", scale_shape(source.shape, names.block)


def write_checkpoint(directory: Path, config: Mapping[str, Any], *, shard_size: int = 4 * 10**9, seed: int = 0) -> int:
    """Writes the directory and returns the bytes of weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # As published files do: layers in the order of their text (1, 10, 11, 2), a shard by dtype, then name.
    order = sorted(entries(config), key=lambda entry: re.split(r"\.(?=experts\.)", entry[0]))
    shards: list[list[Entry]] = [[]]
    size = total = 0
    for entry in order:
        if shards[-1] and size + _nbytes(entry) > shard_size:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += _nbytes(entry)
        total += _nbytes(entry)
    rng = np.random.default_rng(seed)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard.sort(key=lambda entry: (-CODES[entry[1]].itemsize, entry[0]))
        with open(directory / name, "wb") as file:
            _write_shard(file, shard, rng)
        weight_map.update({entry[0]: name for entry in shard})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total


def _nbytes(entry: Entry) -> int:
    return math.prod(entry[2]) * CODES[entry[1]].itemsize


def _write_shard(file: BinaryIO, shard: list[Entry], rng: np.random.Generator) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in shard:
        header[entry[0]] = {"dtype": entry[1], "shape": entry[2], "data_offsets": [end, end + _nbytes(entry)]}
        end += _nbytes(entry)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    normal = rng.standard_normal(1 << 20, np.float32).clip(-4.4, 4.4)  # times 100 is still inside e4m3
    for name, code, shape in shard:
        size = math.prod(shape)
        if name.endswith("norm.weight"):
            values = np.ones(size, np.float32)
        elif name.endswith("_scale_inv"):
            # The e4m3 values have a deviation of 100, the weights one of 1 / sqrt(columns).
            values = rng.uniform(0.8, 1.25, size).astype(np.float32) / (100 * math.sqrt(shape[-1] * 128))
        else:
            # Drawing billions of normals would take minutes: a tensor is a stretch from its own place.
            deviation = 100.0 if code == "F8_E4M3" else 1 / math.sqrt(shape[-1])
            values = _stretch(normal, size, rng) * np.float32(deviation)
        file.write(values.astype(CODES[code]).view(np.uint8).data)


def _stretch(normal: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    if size < len(normal):
        start = int(rng.integers(len(normal) - size))
        return normal[start : start + size]
    return np.resize(np.roll(normal, -int(rng.integers(len(normal)))), size)


def parse_size(text: str) -> int:
    """`4GB`, `500MB`, `1000` -> bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]b)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a size like 4GB or 500MB, got {text!r}")
    return int(float(match[1]) * UNITS[match[2] or ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    for name, default in (("layers", 4), ("experts", 16), ("top-k", 4), ("hidden", 256), ("width", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--block", type=int, default=128, help="rows and columns per FP8 scale")
    parser.add_argument("--shard-size", type=parse_size, default=parse_size("4GB"))
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args())
    directory, shard_size, seed = args.pop("directory"), args.pop("shard_size"), args.pop("seed")
    total = write_checkpoint(directory, make_config(**args), shard_size=shard_size, seed=seed)
    print(json.dumps({"directory": str(directory), "bytes": total}))


if __name__ == "__main__":
    main()
