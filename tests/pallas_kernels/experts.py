"""Random experts in slots, and their arithmetic in NumPy float64, for the tests of the MoE kernels."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.layout import FP4, FP4_BLOCK, FP8, FP8_BLOCK, SWIGLU, Activation, ScaleKind, swiglu_layout

# GPT-OSS has these two; half the values that the tests' experts make are clamped.
OAI = Activation(limit=0.7, slope=1.702, shift=1.0)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)


# What the experts of some cases have besides, by (dtype of the expert, dtype of x): GPT-OSS as published and in bf16,
# DeepSeek-V4's clamps.
EXTRAS = {
    (FP4, BF16): {"activation": OAI, "bias": BF16},
    (FP4, F32): {"activation": Activation(limit=1.0)},
    (BF16, F32): {"activation": OAI, "bias": BF16},
    (F16, BF16): {"activation": Activation(limit=0.5)},
}


def random_slots(
    hidden: int,
    width: int,
    dtype: np.dtype,
    *,
    slots: int,
    seed: int = 0,
    activation: Activation = SWIGLU,
    bias: np.dtype | None = None,
    scales: ScaleKind | None = None,
):
    """(layout, slots [S, n], the unpacked tensors of every slot)."""
    layout = swiglu_layout(hidden=hidden, width=width, dtype=dtype, activation=activation, bias=bias, scales=scales)
    rng = np.random.default_rng(seed)

    def tensor(field):
        if field.dtype == np.uint8:  # FP4: exponents, or any two codes
            low, high = (120, 125) if field.name.endswith("_scale") else (0, 256)
            return rng.integers(low, high, field.shape, np.uint8)
        if field.name.endswith("_scale"):
            return rng.uniform(0.01, 0.03, field.shape).astype(np.float32)
        return (rng.normal(size=field.shape) * (3.0 if layout.scales else 0.05)).astype(field.dtype)

    tensors = [{field.name: tensor(field) for field in layout.fields} for _ in range(slots)]
    return layout, jnp.asarray(np.stack([layout.pack(t) for t in tensors])), tensors


def oracle(
    tensors: dict[str, np.ndarray], x: np.ndarray, *, round_hidden: bool, activation: Activation = SWIGLU
) -> np.ndarray:
    """Output of one expert for a token, float64."""

    def weight(name: str) -> np.ndarray:
        if tensors[name].dtype == np.uint8:
            codes = np.stack([tensors[name] & 15, tensors[name] >> 4], axis=-1).reshape(len(tensors[name]), -1)
            scales = 2.0 ** (tensors[f"{name}_scale"].astype(np.float64) - 127)
            return E2M1[codes] * np.repeat(scales, FP4_BLOCK, axis=1)
        value = tensors[name].astype(np.float64)
        if f"{name}_scale" not in tensors:
            return value
        scale = tensors[f"{name}_scale"].astype(np.float64)
        if scale.ndim == 1:
            return value * scale[:, None]
        rows, cols = np.indices(value.shape) // FP8_BLOCK
        return value * scale[rows, cols]

    def product(name: str, x: np.ndarray) -> np.ndarray:
        return weight(name) @ x + tensors.get(f"{name}_bias", np.zeros(1)).astype(np.float64)

    gate, up = product("gate", x.astype(np.float64)), product("up", x.astype(np.float64))
    if activation.limit is not None:
        gate, up = np.minimum(gate, activation.limit), np.clip(up, -activation.limit, activation.limit)
    hidden = gate / (1 + np.exp(-activation.slope * gate)) * (up + activation.shift)
    if round_hidden:
        hidden = hidden.astype(np.float32).astype(BF16).astype(np.float64)
    return product("down", hidden)


def error(got, want) -> float:
    """Norm of the difference over the norm of the truth."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


# Real shapes: K, H, F, dtype. The peer comparison, Qwen3-30B-A3B FP8, the demo model, gpt-oss.
REAL_SHAPES = {
    "peer": (4, 2048, 1536, BF16),
    "qwen3-30b-fp8": (8, 2048, 768, FP8),
    "demo": (4, 256, 64, BF16),
    "gpt-oss": (4, 2880, 2880, BF16),
    "gpt-oss-mxfp4": (4, 2880, 2880, FP4),
    "qwen3-30b-fp8-channel": (8, 2048, 768, FP8),
    "qwen3-30b-partly-fp8": (8, 2048, 768, BF16),
}
SCALES: dict[str, ScaleKind] = {"qwen3-30b-fp8-channel": "channel", "qwen3-30b-partly-fp8": "block"}


def real_layout(name: str):
    _, hidden, width, dtype = REAL_SHAPES[name]
    return swiglu_layout(
        hidden=hidden, width=width, dtype=dtype, scales=SCALES.get(name), **EXTRAS.get((dtype, BF16), {})
    )
