"""Weights in files that are not read: what they are, and what to do with them."""

from __future__ import annotations

from pathlib import Path

CONVERT = "convert them: load the model with transformers and call save_pretrained"
# Patterns of files, what they are and what to do; the first that is there tells most.
KINDS = (
    ("*.gguf", "GGUF", "take the safetensors checkpoint that it was made from, or " + CONVERT),
    ("adapter_model.*", "an adapter (LoRA) without its model", "merge it into its model with peft's merge_and_unload"),
    ("consolidated*", "weights in Mistral's or Meta's own form", "take the same model's files for transformers"),
    ("pytorch_model*.bin", "pickled weights, which may run code when they are read", CONVERT),
    ("*.pth", "pickled weights, which may run code when they are read", CONVERT),
    ("*.pt", "pickled weights, which may run code when they are read", CONVERT),
    ("*.bin", "pickled weights, which may run code when they are read", CONVERT),
    ("*.ckpt", "pickled weights, which may run code when they are read", CONVERT),
    ("*.h5", "weights for TensorFlow", CONVERT),
    ("*.msgpack", "weights for Flax", CONVERT),
    ("*.onnx", "an ONNX graph", "take the safetensors checkpoint that it was made from"),
    ("model-*-of-*.safetensors", "shards without their index", "download model.safetensors.index.json too"),
    ("*.safetensors", "safetensors files of other names", "name a single one model.safetensors, or add an index"),
)


def other_weights(directory: Path) -> tuple[str, str] | None:
    """What there is in a directory instead of weights that are read, and what to do; None where there is nothing."""
    for pattern, kind, advice in KINDS:
        if found := sorted(path.name for path in directory.glob(pattern)):
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            return f"{found[0]}{more} ({kind})", advice
    return None
