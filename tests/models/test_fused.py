"""Claims about the fused half-layers: they compute what the plain ones do, and say what they leave to XLA."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.router_choice.config import Recorded
from seqmoe_jax.loading import random_weights
from seqmoe_jax.models import fused
from seqmoe_jax.models.families import spec_from_config
from seqmoe_jax.models.fused import PLAIN, DecodeKernels
from seqmoe_jax.models.routers import Groups
from seqmoe_jax.testing import tiny_config

KERNELS = replace(DecodeKernels.of("gpu"), interpret=True)


# One layer each: norms of heads; of the full width, clipped; sinks in a window, biases; half a head rotated.
FAMILIES = {
    "qwen3_moe": tiny_config(num_hidden_layers=1, mlp_only_layers=[]),
    "olmoe": tiny_config(model_type="olmoe", num_hidden_layers=1, intermediate_size=32, clip_qkv=0.5),
    "gpt_oss": tiny_config(model_type="gpt_oss", num_hidden_layers=1, num_local_experts=8, intermediate_size=32,
                           sliding_window=20, layer_types=["sliding_attention"],
                           rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    "glm4_moe": tiny_config(model_type="glm4_moe", num_hidden_layers=1, n_routed_experts=8, n_shared_experts=1,
                            first_k_dense_replace=0, n_group=1, topk_group=1, partial_rotary_factor=0.5,
                            attention_bias=True, routed_scaling_factor=2.5),
}  # fmt: skip


def model_of(family):
    spec = spec_from_config(FAMILIES[family])
    return spec, random_weights(jax.random.key(3), spec=spec, dtype=np.dtype(np.float32))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_and_the_head_are_those_of_plain_xla(family):
    spec, weights = model_of(family)
    assert fused.unfit(spec, KERNELS) == []
    layer, w = spec.layers[0], weights.layers[0]
    state = jax.tree.map(
        lambda a: jax.random.normal(jax.random.key(1), a.shape), layer.mixer.init_state(2, 48, np.dtype(np.float32))
    )
    x, positions = jax.random.normal(jax.random.key(0), (2, 1, spec.hidden)), jnp.array([[5], [40]], jnp.int32)
    active, tokens = jnp.array([True, False]), jnp.zeros(2, jnp.int32)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    recorded = Recorded(jnp.array([[[3, 1]]]), jnp.array([[[0.75, 0.25]]]), jnp.int32(0), jnp.int32(0))

    @partial(jax.jit, static_argnames="kernels")
    def run(x, state, kernels):
        pending = fused.Pending(x, 2.0 * x[:, 0])  # as the layer before leaves it
        x, state = fused.mix(pending, state, positions, active, w, layer, kernels)
        return (
            x,
            state,
            fused.route(x, tokens, active, w, layer, kernels),
            fused.route(x, tokens, active, w, layer, kernels, recorded)[2:],
            fused.logits_of(x[:, 0], weights, spec, kernels),
        )

    actual, expected = run(x, state, KERNELS), run(x, state, PLAIN)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        close(a, b)
    assert (actual[2][2][1] == -1).all(), "a sequence that has ended routes nowhere"


def test_what_has_no_kernel_is_said_and_left_to_xla():
    spec, _ = model_of("qwen3_moe")
    layer = spec.layers[0]
    odd = replace(layer.mixer, head_dim=40, rope=replace(layer.mixer.rope, rotary_dim=40))
    grouped = replace(layer.mlp, router=replace(layer.mlp.router, groups=Groups(n_group=2, topk_group=1, score="max")))
    changed = replace(spec, layers=(replace(layer, mixer=odd, mlp=grouped),))
    assert len(fused.unfit(changed, KERNELS)) == 3  # the heads also where chunks of prompts are read
    assert fused.unfit(changed, PLAIN) == []
    assert DecodeKernels.of("xla") == DecodeKernels.of("tpu") == PLAIN
