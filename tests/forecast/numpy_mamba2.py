"""Mamba2 once more, in NumPy and float64, one step and one head at a time: what the two JAX forms must equal."""

from __future__ import annotations

import numpy as np


def softplus(x):
    return np.log1p(np.exp(x))


def silu(x):
    return x / (1 + np.exp(-x))


def rms(x, scale):
    return x / np.sqrt(np.mean(x * x) + 1e-6) * scale


def block(w, sequence, *, inner, heads, columns):
    """Outputs [T, D] of one block for one sequence [T, D]; `w` as `Mamba2.weights()`."""
    w = {name: np.asarray(value, np.float64) for name, value in w.items()}
    channels = inner // heads
    state = np.zeros((heads, channels, columns))
    history = [np.zeros(inner + 2 * columns)] * 3
    out = []
    for x in np.asarray(sequence, np.float64):
        projected = rms(x, w["norm"]) @ w["in_proj"]
        z, mixed, dt = projected[:inner], projected[inner : 2 * inner + 2 * columns], projected[-heads:]
        history = [*history[-3:], mixed]
        convolved = silu(sum(tap * past for tap, past in zip(w["conv"], history, strict=True)) + w["conv_bias"])
        values, b, c = convolved[:inner], convolved[inner : inner + columns], convolved[inner + columns :]
        y = np.zeros(inner)
        for head in range(heads):
            part = slice(head * channels, (head + 1) * channels)
            step = softplus(dt[head] + w["dt_bias"][head])
            state[head] *= np.exp(-np.exp(w["log_rate"][head]) * step)
            state[head] += step * np.outer(values[part], b)
            y[part] = state[head] @ c + w["skip"][head] * values[part]
        out.append(x + rms(y * silu(z), w["gate_norm"]) @ w["out_proj"])
    return np.stack(out)
