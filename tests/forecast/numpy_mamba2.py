"""Mamba2 once more, in NumPy and float64, one step and one head at a time: what the two JAX forms must equal."""

from __future__ import annotations

import numpy as np


def softplus(x):
    return np.log1p(np.exp(x))


def silu(x):
    return x / (1 + np.exp(-x))


def rms(x, scale):
    return x / np.sqrt(np.mean(x * x) + 1e-6) * scale


def block(w, sequence, *, d_inner, num_heads, d_state):
    """Outputs [T, D] of one block for one sequence [T, D]; `w` as `Mamba2.weights()`."""
    w = {name: np.asarray(value, np.float64) for name, value in w.items()}
    channels = d_inner // num_heads
    state = np.zeros((num_heads, channels, d_state))
    history = [np.zeros(d_inner + 2 * d_state)] * 3
    out = []
    for x in np.asarray(sequence, np.float64):
        projected = rms(x, w["norm"]) @ w["in_proj"]
        z, xbc, dt = projected[:d_inner], projected[d_inner : 2 * d_inner + 2 * d_state], projected[-num_heads:]
        history = [*history[-3:], xbc]
        convolved = silu(sum(tap * past for tap, past in zip(w["conv"], history, strict=True)) + w["conv_bias"])
        values, b, c = np.split(convolved, [d_inner, d_inner + d_state])
        y = np.zeros(d_inner)
        for head in range(num_heads):
            part = slice(head * channels, (head + 1) * channels)
            step = softplus(dt[head] + w["dt_bias"][head])
            state[head] *= np.exp(-np.exp(w["A_log"][head]) * step)
            state[head] += step * np.outer(values[part], b)
            y[part] = state[head] @ c + w["D"][head] * values[part]
        out.append(x + rms(y * silu(z), w["gate_norm"]) @ w["out_proj"])
    return np.stack(out)
