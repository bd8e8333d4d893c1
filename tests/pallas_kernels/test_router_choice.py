"""Claims about the router kernel: experts and weights are the router's own, for every kind it covers."""

from __future__ import annotations

from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import lower_for

from pallas_kernels.router_choice.config import Choice, Recorded, Score
from pallas_kernels.router_choice.gpu import router_choice
from seqmoe_jax.models.routers import RouterSpec, RouterWeights

KINDS = {
    "qwen": {"score": "softmax", "normalize": True},
    "mixtral": {"score": "softmax", "normalize": True, "rounded": False},
    "olmoe": {"score": "softmax"},
    "gpt-oss": {"score": "chosen-softmax", "bias": True},
    "deepseek-v4": {"score": "sqrt-softplus", "correction_bias": True, "normalize": True},
    "deepseek": {"score": "sigmoid", "correction_bias": True, "normalize": True, "eps": 1e-20, "scale": 2.5},
}


def choice_of(spec: RouterSpec) -> Choice:
    return Choice(
        top_k=spec.top_k, score=spec.score, normalize=spec.normalize, eps=spec.eps, scale=spec.scale
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (60, 4)])
def test_it_chooses_and_weighs_as_the_router_does(kind, experts, top_k):
    spec = RouterSpec(num_experts=experts, top_k=top_k, **KINDS[kind])
    rng, batch = np.random.default_rng(experts), 3
    # The router's matrix is the identity, so that its logits are the input, with ties among them.
    logits = jnp.asarray(rng.integers(-8, 8, (batch, experts)) / 4, jnp.float32)
    bias = jnp.asarray(rng.normal(size=experts), jnp.float32) if spec.bias else None
    correction = jnp.asarray(rng.normal(size=experts), jnp.float32) if spec.correction_bias else None
    weights = RouterWeights(jnp.eye(experts), bias, correction)
    expected_ids, expected = spec(logits, jnp.zeros(batch, jnp.int32), weights)
    ids, shares = router_choice(
        logits, jnp.array([True, False, True]), choice=choice_of(spec), bias=bias, correction=correction,
        interpret=True,
    )  # fmt: skip
    np.testing.assert_array_equal(ids[::2], expected_ids[::2])
    np.testing.assert_array_equal(ids[1], -1)
    np.testing.assert_allclose(shares, expected, rtol=1e-6)


def test_recorded_routing_replaces_the_choice():
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, 8, (5, 2, 3)), jnp.int32)
    weights = jnp.asarray(rng.uniform(size=(5, 2, 3)), jnp.float32)
    logits = jnp.asarray(rng.normal(size=(2, 8)), jnp.float32)
    found, shares = router_choice(
        logits, jnp.array([True, False]), choice=Choice(top_k=3, score="softmax"),
        recorded=Recorded(ids, weights, jnp.int32(4), jnp.int32(1)), interpret=True,
    )  # fmt: skip
    np.testing.assert_array_equal(found, [ids[4, 1], [-1, -1, -1]])
    np.testing.assert_array_equal(shares, [weights[4, 1]] * 2)


@pytest.mark.parametrize(("experts", "top_k"), [(32, 4), (128, 8), (512, 10)])
def test_it_lowers_without_the_hardware(experts, top_k):
    logits = jax.ShapeDtypeStruct((4, experts), jnp.float32)
    active, extra = jax.ShapeDtypeStruct((4,), bool), jax.ShapeDtypeStruct((experts,), jnp.float32)
    for score in get_args(Score):
        choice = Choice(top_k=top_k, score=score, normalize=True, rounded_to=jnp.dtype(jnp.bfloat16))
        call = partial(router_choice, choice=choice)
        text = lower_for("cuda", lambda a, b, c, call=call: call(a, b, bias=c, correction=c), logits, active, extra)
        assert "router_choice" in text
    recorded = (*(jax.ShapeDtypeStruct((9, 2, top_k), dtype) for dtype in (jnp.int32, jnp.float32)),
                jax.ShapeDtypeStruct((), jnp.int32))  # fmt: skip
    lower_for("cuda", lambda a, b, *c: call(a, b, recorded=Recorded(*c, jnp.int32(1))), logits, active, *recorded)
