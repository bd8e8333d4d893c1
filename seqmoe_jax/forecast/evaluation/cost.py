"""What a predictor costs: parameters, and arithmetic and memory traffic of one step of one sequence."""

from __future__ import annotations

import math
from typing import NamedTuple

from flax import nnx

from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.mamba2 import D_CONV
from seqmoe_jax.forecast.predictor import Predictor

REFINEMENT = ("known_proj", "refine_norm", "refine_up", "refine_down", "refine_out_norm", "refine_head")
TABLES = ("token_embed",)  # A step reads one row of them.


class Cost(NamedTuple):
    """The cost of `inference.step`, and of `inference.refine` where it runs.

    FLOPs are those of matrix products, convolutions and the state-space recurrence; a multiply-add is two. Norms,
    activations and softmaxes, a few operations per value, are not counted. Bytes are of the weights in 2 bytes each,
    and of the recurrent state, which is read and written once.
    """

    parameters: int
    flops_per_step: int
    bytes_per_step: int
    refinement_flops: int
    refinement_bytes: int


def cost(config: PredictorConfig) -> Cost:
    """The cost of a predictor, from its configuration alone; no weights are made."""
    shapes = nnx.eval_shape(lambda: Predictor(config, rngs=nnx.Rngs(0)).weights())
    blocks = [math.prod(leaf.shape) for block in shapes["blocks"] for leaf in block.values()]
    sizes = {name: math.prod(leaf.shape) for name, leaf in shapes.items() if name != "blocks"}
    step = [name for name in sizes if name not in (*REFINEMENT, *TABLES)]
    products = sum(sizes[name] for name in step if name.endswith(("_proj", "_head")))
    block = config.block
    in_width = block.d_inner + block.conv_dim + block.num_heads
    per_block = 2 * config.d_model * (in_width + block.d_inner)  # the two projections
    per_block += 2 * D_CONV * block.conv_dim
    per_block += 5 * block.d_inner * block.d_state  # decay, input and sum of the state; its product with C
    state = config.blocks * (4 * block.d_inner * block.d_state + 2 * (D_CONV - 1) * block.conv_dim)
    row = 2 * config.token_width if config.uses_token else 0
    return Cost(
        parameters=sum(sizes.values()) + sum(blocks),
        flops_per_step=2 * products + config.blocks * per_block,
        bytes_per_step=2 * (sum(sizes[name] for name in step) + sum(blocks)) + row + 2 * state,
        refinement_flops=2 * sum(sizes[name] for name in REFINEMENT if not name.endswith("norm")),
        refinement_bytes=2 * sum(sizes[name] for name in REFINEMENT),
    )


def describe(cost: Cost) -> str:
    """The cost in one line."""
    return (
        f"{cost.parameters / 1e6:.2f} M parameters; a step: {cost.flops_per_step / 1e6:.2f} MFLOP, "
        f"{cost.bytes_per_step / 1e6:.2f} MB; a refinement: {cost.refinement_flops / 1e6:.2f} MFLOP, "
        f"{cost.refinement_bytes / 1e6:.2f} MB"
    )
