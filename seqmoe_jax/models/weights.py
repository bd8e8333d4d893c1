"""The dense weights (everything that is not an expert) as pytrees. Matrices are [out, in], as in checkpoints."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float


class AttentionWeights(NamedTuple):
    """Query, key and value projections are one matrix, rows in that order: one product instead of three."""

    qkv: Float[Array, "NGGD H"]
    o: Float[Array, "H ND"]
    q_norm: Float[Array, " D"]
    k_norm: Float[Array, " D"]


class DenseWeights(NamedTuple):
    gate_up: Float[Array, "FF H"]
    down: Float[Array, "H F"]


class RouterWeights(NamedTuple):
    router: Float[Array, "E H"]


class LayerWeights(NamedTuple):
    attention_norm: Float[Array, " H"]
    attention: AttentionWeights
    mlp_norm: Float[Array, " H"]
    mlp: DenseWeights | RouterWeights


class ModelWeights(NamedTuple):
    embed: Float[Array, "V H"]
    layers: tuple[LayerWeights, ...]
    norm: Float[Array, " H"]
    head: Float[Array, "V H"]  # the same array as `embed` where the model ties them
