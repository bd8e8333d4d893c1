"""What `quantization_config` says of the weights, and in which words a format that is not read is refused.

The files have the last word on which tensors are quantised and on the shape of their scales (`checkpoints/experts.py`);
what stands here is known before they are opened.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pallas_kernels.layout import FP4, FP8, FP8_BLOCK, ScaleKind
from seqmoe_jax.fields import Fields

MOST_MODULES = 1 << 18  # lists of modules may name every expert
# What other formats are, by what their files call them.
UNREAD = {
    "aqlm": "AQLM codebooks",
    "auto-round": "packed integers of AutoRound",
    "awq": "packed 4-bit integers of AWQ",
    "bitnet": "ternary weights",
    "bitsandbytes": "8-bit or 4-bit weights of bitsandbytes",
    "eetq": "int8 weights of EETQ",
    "gguf": "GGUF blocks",
    "gptq": "packed integers of GPTQ",
    "hqq": "packed integers of HQQ",
    "int-quantized": "int8 weights with scales per channel",
    "marlin-24": "sparse packed integers",
    "mxfp4-pack-quantized": "MXFP4 in the form of compressed-tensors",
    "mxfp8": "FP8 with a power of two per 32 columns",
    "nvfp4": "4-bit floats of NVFP4",
    "nvfp4-pack-quantized": "4-bit floats of NVFP4",
    "pack-quantized": "packed integers",
    "quanto": "weights of Quanto",
    "quark": "weights of Quark",
    "torchao": "weights of torchao",
}
READ = "FP8 (e4m3) with scales per tensor, channel or block, MXFP4 of GPT-OSS, and weights that are not quantised"
ADVICE = (
    "take a checkpoint of this model in one of these, or load it with transformers, dequantise() it and save_pretrained"
)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Weights in `dtype`, FP8 or FP4. Of FP8 `block` is how many rows and columns share a scale (None: all of a
    tensor), `activations` whether servers quantise these too, `plain` the modules that are not quantised, by name or
    by a pattern that begins with "re:"."""

    dtype: np.dtype
    block: tuple[int | None, int | None] = (None, None)
    activations: bool = False
    plain: tuple[str, ...] = ()

    @property
    def scales(self) -> ScaleKind | None:
        """What of an expert's layout holds such scales exactly; None: nothing does."""
        return next((kind for kind in SCALES if holds(kind, self.block)), None)


# Rows and columns of a scale in the layouts of experts; None: all.
SCALES: dict[ScaleKind, tuple[int | None, int | None]] = {"block": (FP8_BLOCK, FP8_BLOCK), "channel": (1, None)}


def holds(kind: ScaleKind, block: tuple[int | None, int | None]) -> bool:
    """Whether scales of blocks of so many rows and columns are scales of this kind, written out more than once."""
    return all(
        theirs is None or (ours is not None and theirs % ours == 0)
        for ours, theirs in zip(SCALES[kind], block, strict=True)
    )


def read_quantization(config: Fields) -> Quantization | None:
    """None where nothing is quantised. Raises `ConfigError` for what is not read."""
    fields = config.group("quantization_config")
    if not fields.values:
        return None
    method = fields.text("quant_method", "modelopt" if "quant_algo" in fields.values else "nothing")
    match method:
        case "mxfp4":
            return Quantization(dtype=FP4)
        case "fp8":
            return _fp8(fields)
        case "fbgemm_fp8":
            return Quantization(dtype=FP8, block=(1, None), activations=True, plain=_plain(fields))
        case "compressed-tensors":
            return _compressed_tensors(fields)
        case "modelopt":
            return _modelopt(fields)
    raise _unread(fields, "quant_method", method)


def _fp8(fields: Fields) -> Quantization:
    if (kind := fields.text("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise fields.unsupported("fmt", kind, ("e4m3",))
    # As in transformers: blocks are of 128 x 128 where nothing is said of them, null is a scale per tensor.
    null = "weight_block_size" in fields.values and fields.values["weight_block_size"] is None
    block = (None, None) if null else _pair(fields, "weight_block_size")
    return Quantization(dtype=FP8, block=block, activations=True, plain=_plain(fields))


def _compressed_tensors(fields: Fields) -> Quantization:
    """Groups of modules, each with a format of its own; the coarsest scales that all have."""
    name = fields.text("format", "float-quantized")
    if name not in ("float-quantized", "naive-quantized", "mixed-precision"):
        raise _unread(fields, "format", name)
    if (sparse := fields.group("sparsity_config").text("format", "dense")) != "dense":
        raise _unread(fields.group("sparsity_config"), "format", sparse)
    groups = fields.group("config_groups")
    blocks, activations = [], False
    for key in groups.values:
        group = groups.group(key)
        if (name := group.text("format", "float-quantized")) not in ("float-quantized", "naive-quantized"):
            raise _unread(group, "format", name)
        weights = group.group("weights")
        kind, bits = weights.text("type", "int"), weights.size("num_bits", 8)
        if (kind, bits) != ("float", 8):
            raise _unread(weights, "type", kind if kind == "float" else f"int{bits}", f"{kind} weights of {bits} bits")
        blocks.append(_strategy(weights))
        activations |= bool(group.group("input_activations").values)
    if not blocks:
        raise fields.fault("config_groups", "an object of groups with weights", groups.values)
    block = next((block for block in blocks if block != (None, None)), (None, None))
    return Quantization(dtype=FP8, block=block, activations=activations, plain=_plain(fields))


def _strategy(weights: Fields) -> tuple[int | None, int | None]:
    match strategy := weights.text("strategy", "tensor"):
        case "tensor":
            return None, None
        case "channel":
            return 1, None
        case "block":
            return _pair(weights, "block_structure")
        case "group":
            return 1, weights.size("group_size")
    raise weights.unsupported("strategy", strategy, ("tensor", "channel", "block", "group"))


def _modelopt(fields: Fields) -> Quantization:
    match algorithm := fields.text("quant_algo", "nothing").upper():
        case "FP8":
            block: tuple[int | None, int | None] = (None, None)
        case "FP8_PER_CHANNEL_PER_TOKEN":
            block = (1, None)
        case "FP8_PB_WO":
            block = (FP8_BLOCK, FP8_BLOCK)
        case _:
            raise _unread(fields, "quant_algo", algorithm)
    return Quantization(dtype=FP8, block=block, activations=algorithm != "FP8_PB_WO", plain=_plain(fields))


def _pair(fields: Fields, name: str) -> tuple[int, int]:
    block = fields.ints(name, (FP8_BLOCK, FP8_BLOCK), within=(1, 1 << 20))
    if len(block) != 2:
        raise fields.fault(name, "two integers", list(block))
    return block[0], block[1]


def _plain(fields: Fields) -> tuple[str, ...]:
    names = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
    return tuple(item for name in names for item in fields.texts(name, (), most=MOST_MODULES))


def _unread(fields: Fields, name: str, value: str, what: str | None = None) -> Exception:
    what = what or UNREAD.get(value.lower(), "another format")
    return fields.error(f"{fields.where}: {name} {value!r} ({what}) is not supported; supported are {READ}; {ADVICE}")
