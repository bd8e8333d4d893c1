"""Muon for the weight matrices, AdamW for the embedding, the router and the norms, all from optax."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

from scripts.demo.model import Params

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


class OptimizerConfig(NamedTuple):
    """Hyperparameters. Weight decay is `matrix_decay` for the matrices, `other_decay` for embedding and router."""

    name: str = "muon"  # or "adamw" for everything
    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    matrix_decay: float = 0.1
    other_decay: float = 0.1
    clip: float = 1.0


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """The optimizer at a learning rate of 1: multiply its updates by the rate. It skips gradients that are not finite.

    Muon's updates are scaled so that they are as large as AdamW's would be (`consistent_rms`, arXiv 2502.16982);
    stacked matrices (layers, experts) are orthogonalised one by one.
    """
    adamw = partial(optax.adamw, 1.0, b1=config.beta1, b2=config.beta2)
    groups = {
        "matrix": adamw(weight_decay=config.matrix_decay),
        "table": adamw(weight_decay=config.other_decay),
        "norm": adamw(weight_decay=0.0),
    }
    if config.name == "muon":
        groups["matrix"] = muon(
            1.0,
            beta=config.momentum,
            weight_decay=config.matrix_decay,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=partial(jax.tree.map, lambda _: MuonDimensionNumbers(-2, -1)),
        )

    def labels(params: Params) -> dict[str, str]:
        return {n: "matrix" if n in MATRICES else "norm" if n.endswith("norm") else "table" for n in params}

    chain = optax.chain(optax.clip_by_global_norm(config.clip), optax.partition(groups, labels))
    return optax.apply_if_finite(chain, max_consecutive_errors=10**9)
