"""The cost of a predictor, counted from its configuration, is that of the compiled step and of the stored arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from seqmoe_jax.forecast import inference
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.evaluation.cost import cost, describe
from seqmoe_jax.forecast.predictor import Predictor

CONFIG = PredictorConfig(
    model="m", layers=4, experts=32, active=4, d_model=128, blocks=2, vocabulary=500, token_rows=300, token_width=32,
    echo=0, refine_width=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def weights():
    return Predictor(CONFIG, rngs=nnx.Rngs(0)).weights()


def test_parameters_are_those_of_the_arrays(weights):
    assert cost(CONFIG).parameters == sum(leaf.size for leaf in jax.tree.leaves(weights))
    only = dataclasses.replace(CONFIG, inputs="activations")
    token = weights["token_embed"].size + weights["token_proj"].size
    assert cost(CONFIG).parameters - cost(only).parameters == token


def test_flops_are_those_of_the_compiled_programs(weights):
    weights = weights | {"token_table": jnp.zeros(500, jnp.int32)}
    state, features = inference.init_state(CONFIG, 1), jnp.zeros((1, CONFIG.keys))
    step = jax.jit(lambda w, s, f, t: inference.step(CONFIG, w, s, f, t))
    analysed = step.lower(weights, state, features, jnp.zeros(1, jnp.int32)).compile().cost_analysis()
    # XLA counts norms and activations too.
    assert cost(CONFIG).flops_per_step == pytest.approx(analysed["flops"], rel=0.1)
    refine = jax.jit(lambda w, s, f: inference.refine(CONFIG, w, s, f))
    analysed = refine.lower(weights, state, features).compile().cost_analysis()
    assert cost(CONFIG).refinement_flops == pytest.approx(analysed["flops"], rel=0.1)


def test_bytes_are_the_weights_of_a_step_and_the_state_twice(weights):
    of_step = [
        "in_proj", "in_bias", "token_proj", "norm", "next_head", "next_bias", "odds_scale", "odds_bias",
        "retention_head", "retention_bias",
    ]  # fmt: skip
    read = sum(weights[name].size for name in of_step) + sum(leaf.size for leaf in jax.tree.leaves(weights["blocks"]))
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(inference.init_state(CONFIG, 1, jnp.bfloat16)["blocks"]))
    assert cost(CONFIG).bytes_per_step == 2 * read + 2 * CONFIG.token_width + 2 * state
    assert "M parameters; a step:" in describe(cost(CONFIG))
