"""Random experts in slots, and their arithmetic in NumPy float64, for the tests of the MoE kernels."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.layout import FP8, FP8_BLOCK, swiglu_layout

BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)


def random_slots(hidden: int, width: int, dtype: np.dtype, *, slots: int, seed: int = 0):
    """(layout, slots [S, n], the unpacked tensors of every slot)."""
    layout, rng = swiglu_layout(hidden=hidden, width=width, dtype=dtype), np.random.default_rng(seed)

    def tensor(field):
        if field.name.endswith("_scale"):
            return rng.uniform(0.01, 0.03, field.shape).astype(np.float32)
        return (rng.normal(size=field.shape) * (3.0 if dtype == FP8 else 0.05)).astype(field.dtype)

    tensors = [{field.name: tensor(field) for field in layout.fields} for _ in range(slots)]
    return layout, jnp.asarray(np.stack([layout.pack(t) for t in tensors])), tensors


def oracle(tensors: dict[str, np.ndarray], x: np.ndarray, *, round_hidden: bool) -> np.ndarray:
    """Output of one expert for a token, float64."""

    def weight(name: str) -> np.ndarray:
        value = tensors[name].astype(np.float64)
        if f"{name}_scale" not in tensors:
            return value
        rows, cols = np.indices(value.shape) // FP8_BLOCK
        return value * tensors[f"{name}_scale"].astype(np.float64)[rows, cols]

    x = x.astype(np.float64)
    gate, up = weight("gate") @ x, weight("up") @ x
    hidden = gate / (1 + np.exp(-gate)) * up
    if round_hidden:
        hidden = hidden.astype(np.float32).astype(BF16).astype(np.float64)
    return weight("down") @ hidden


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
}
