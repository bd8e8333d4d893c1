"""What a predictor costs: parameters, and arithmetic and memory traffic of one step of one sequence."""

from __future__ import annotations

import math
from typing import NamedTuple

from flax import nnx

from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.mamba2 import CONV
from seqmoe_jax.forecast.predictor import Predictor

REFINEMENT = ("known_proj", "refine_norm", "refine_up", "refine_down", "refine_out_norm", "refine_head")
TABLES = ("token_embed",)  # of which a step reads one row


class Cost(NamedTuple):
    """Of `plain.step`, and of `plain.refine` where it runs. A multiply-add is two FLOPs.

    Counted: matrix products, convolution, state-space recurrence. Norms, activations and softmaxes are left out: a few
    operations per value. Bytes are of weights stored in 2 bytes and of the recurrent state, read and written once.
    """

    parameters: int
    flops_per_step: int
    bytes_per_step: int
    refinement_flops: int
    refinement_bytes: int


def cost(config: PredictorConfig) -> Cost:
    """Computed from the configuration alone; no weights are made."""
    shapes = nnx.eval_shape(lambda: Predictor(config, rngs=nnx.Rngs(0)).weights())
    blocks = [math.prod(leaf.shape) for block in shapes["blocks"] for leaf in block.values()]
    sizes = {name: math.prod(leaf.shape) for name, leaf in shapes.items() if name != "blocks"}
    step = [name for name in sizes if name not in (*REFINEMENT, *TABLES)]
    products = sum(sizes[name] for name in step if name.endswith(("_proj", "_head")))
    block = config.block
    in_columns = block.inner + block.convolved + block.heads
    per_block = 2 * config.width * (in_columns + block.inner)  # the two projections
    per_block += 2 * CONV * block.convolved
    per_block += 5 * block.inner * block.columns  # decay, input and sum of the state; its product with C
    state = config.blocks * (4 * block.inner * block.columns + 2 * (CONV - 1) * block.convolved)
    row = 2 * config.token_width if config.uses_token else 0
    return Cost(
        parameters=sum(sizes.values()) + sum(blocks),
        flops_per_step=2 * products + config.blocks * per_block,
        bytes_per_step=2 * (sum(sizes[name] for name in step) + sum(blocks)) + row + 2 * state,
        refinement_flops=2 * sum(sizes[name] for name in REFINEMENT if not name.endswith("norm")),
        refinement_bytes=2 * sum(sizes[name] for name in REFINEMENT),
    )


def describe(cost: Cost) -> str:
    """In one line."""
    return (
        f"{cost.parameters / 1e6:.2f} M parameters; a step: {cost.flops_per_step / 1e6:.2f} MFLOP, "
        f"{cost.bytes_per_step / 1e6:.2f} MB; a refinement: {cost.refinement_flops / 1e6:.2f} MFLOP, "
        f"{cost.refinement_bytes / 1e6:.2f} MB"
    )
