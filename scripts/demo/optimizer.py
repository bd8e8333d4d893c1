"""Muon for the weight matrices, AdamW for the embedding, the router and the norms.

Muon replaces a matrix's momentum by the nearest orthogonal matrix (five Newton-Schulz steps), scaled so that an update
has the size an AdamW update has; stacked matrices (layers, experts) are treated one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from scripts.demo.model import Params

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


class OptimizerConfig(NamedTuple):
    """Hyperparameters. Weight decay is `matrix_decay` for the matrices, `other_decay` for embedding and router."""

    name: str = "muon"  # or "adamw" for everything
    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    matrix_decay: float = 0.1
    other_decay: float = 0.1
    clip: float = 1.0


class OptimizerState(NamedTuple):
    """First and second moments (the second is empty for matrices under Muon) and the number of steps."""

    first: Params
    second: Params
    steps: Array


def uses_muon(name: str, config: OptimizerConfig) -> bool:
    return config.name == "muon" and name in MATRICES


def init_state(params: Params, config: OptimizerConfig) -> OptimizerState:
    first = {name: jnp.zeros_like(value) for name, value in params.items()}
    second = {name: jnp.zeros_like(value) for name, value in params.items() if not uses_muon(name, config)}
    return OptimizerState(first, second, jnp.zeros((), jnp.int32))


def orthogonalise(matrix: Array, steps: int = 5) -> Array:
    """An approximately orthogonal matrix of the same row and column space, for a stack `[..., rows, cols]`."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.astype(jnp.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    x = jnp.swapaxes(x, -1, -2) if tall else x
    norm = jnp.linalg.norm(x.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    x = (x / (norm + 1e-7)).astype(jnp.bfloat16)

    def newton_schulz(_: int, x: Array) -> Array:
        gram = x @ jnp.swapaxes(x, -1, -2)
        return a * x + (b * gram + c * (gram @ gram)) @ x

    x = lax.fori_loop(0, steps, newton_schulz, x)
    return (jnp.swapaxes(x, -1, -2) if tall else x).astype(jnp.float32)


def update(
    params: Params, grads: Params, state: OptimizerState, rate: Array, config: OptimizerConfig
) -> tuple[Params, OptimizerState, Array]:
    """One step at learning rate `rate`. Returns the gradient's norm too."""
    norm = jnp.sqrt(sum((jnp.sum(grad**2) for grad in grads.values()), start=jnp.zeros(())))
    shrink = jnp.minimum(1.0, config.clip / (norm + 1e-6))
    count = state.steps + 1
    new: Params = {}
    first: Params = {}
    second: Params = {}
    for name, value in params.items():
        grad = grads[name] * shrink
        if uses_muon(name, config):
            first[name] = config.momentum * state.first[name] + grad
            step = orthogonalise(grad + config.momentum * first[name])
            step = 0.2 * max(value.shape[-2:]) ** 0.5 * step
        else:
            first[name] = config.beta1 * state.first[name] + (1 - config.beta1) * grad
            second[name] = config.beta2 * state.second[name] + (1 - config.beta2) * grad**2
            mean = first[name] / (1 - config.beta1**count)
            variance = second[name] / (1 - config.beta2**count)
            step = mean / (jnp.sqrt(variance) + config.eps)
        if name in MATRICES:
            step = step + config.matrix_decay * value
        elif not name.endswith("norm"):
            step = step + config.other_decay * value
        new[name] = value - rate * step
    finite = jnp.isfinite(norm)  # a step with a broken gradient is skipped
    keep = jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, params)
    kept = jax.tree.map(
        lambda after, before: jnp.where(finite, after, before),
        OptimizerState(first, second, count),
        state,
    )
    return keep, kept, norm
