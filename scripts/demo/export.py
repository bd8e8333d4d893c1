"""Training parameters <-> a Hugging Face safetensors file in bfloat16, and files cut into parts.

    python -m scripts.demo.export join PARTS_DIR OUT_FILE

puts `model.safetensors.part0`, `.part1`, ... together and checks the SHA-256 in `parts.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save

from scripts.demo.model import ModelConfig

BF16 = np.dtype(ml_dtypes.bfloat16)
PART_BYTES = 14_000_000
NAME = "model.safetensors"
LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "moe_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "router": "mlp.gate",
}
EXPERT_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def hf_tensors(params: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Hugging Face names and bfloat16 arrays, matrices as `[out, in]`, one tensor per expert matrix."""
    bf16 = {name: np.asarray(value).astype(BF16) for name, value in params.items()}
    yield "model.embed_tokens.weight", bf16["embed"]
    layers, experts = bf16["gate"].shape[:2]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, hf_name in LAYER_NAMES.items():
            yield f"{prefix}{hf_name}.weight", bf16[name][layer].T
        for expert in range(experts):
            for name, hf_name in EXPERT_NAMES.items():
                yield f"{prefix}mlp.experts.{expert}.{hf_name}.weight", bf16[name][layer, expert].T
    yield "model.norm.weight", bf16["final_norm"]


def safetensors_bytes(params: dict[str, np.ndarray]) -> bytes:
    """The whole file."""
    return save({name: np.ascontiguousarray(value) for name, value in hf_tensors(params)}, {"format": "pt"})


def read_params(path: Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """The parameters of a file written by `safetensors_bytes`, as float32."""
    tensors = load_file(path)
    params = {"embed": tensors["model.embed_tokens.weight"], "final_norm": tensors["model.norm.weight"]}
    prefixes = [f"model.layers.{layer}." for layer in range(config.layers)]
    for name, hf_name in LAYER_NAMES.items():
        params[name] = np.stack([tensors[f"{prefix}{hf_name}.weight"].T for prefix in prefixes])
    for name, hf_name in EXPERT_NAMES.items():
        params[name] = np.stack(
            [
                np.stack([tensors[f"{prefix}mlp.experts.{e}.{hf_name}.weight"].T for e in range(config.num_experts)])
                for prefix in prefixes
            ]
        )
    return {name: value.astype(np.float32) for name, value in params.items()}


def write_parts(data: bytes, folder: Path, **facts: object) -> None:
    """Parts of at most `PART_BYTES` and `parts.json` with their checksum and any `facts`."""
    count = math.ceil(len(data) / PART_BYTES)
    for index in range(count):
        part = folder / f"{NAME}.part{index}"
        temporary = part.with_suffix(".tmp")
        temporary.write_bytes(data[index * PART_BYTES : (index + 1) * PART_BYTES])
        temporary.replace(part)
    summary = {"parts": count, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), **facts}
    (folder / "parts.json").write_text(json.dumps(summary, indent=1) + "\n")


def join_parts(folder: Path) -> bytes:
    """The file that `write_parts` cut; raises `ValueError` where the checksum differs."""
    summary = json.loads((folder / "parts.json").read_text())
    data = b"".join((folder / f"{NAME}.part{index}").read_bytes() for index in range(summary["parts"]))
    if hashlib.sha256(data).hexdigest() != summary["sha256"]:
        raise ValueError(f"the parts in {folder} do not match their checksum")
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    join = commands.add_parser("join")
    join.add_argument("parts", type=Path)
    join.add_argument("out", type=Path)
    args = parser.parse_args()
    data = join_parts(args.parts)
    args.out.write_bytes(data)
    print(f"{args.out}: {len(data)} bytes, checksum right")


if __name__ == "__main__":
    main()
