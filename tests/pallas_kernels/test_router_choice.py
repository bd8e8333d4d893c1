"""Claims about the choice of experts: the kernel's are the reference's, for every kind of score."""

from __future__ import annotations

from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import lower_for

from pallas_kernels.router_choice import Choice, Recorded, router_choice
from pallas_kernels.router_choice.config import Score

BF16 = jnp.dtype(jnp.bfloat16)
# What a router is beside the number of experts, and which of the optional operands it has.
KINDS = {
    "qwen": ({"score": "softmax", "normalize": True, "rounded_to": BF16}, ()),
    "mixtral": ({"score": "softmax", "normalize": True}, ()),
    "olmoe": ({"score": "softmax"}, ()),
    "gpt-oss": ({"score": "chosen-softmax"}, ("bias",)),
    "deepseek-v4": ({"score": "sqrt-softplus", "normalize": True}, ("correction",)),
    "deepseek": ({"score": "sigmoid", "normalize": True, "eps": 1e-20, "scale": 2.5}, ("correction",)),
}
ACTIVE = jnp.array([True, False, True])


def case(kind, experts, top_k):
    """Logits with ties among them, and how to choose."""
    how, optional = KINDS[kind]
    rng = np.random.default_rng(experts)
    logits = jnp.asarray(rng.integers(-8, 8, (3, experts)) / 4, jnp.float32)
    return logits, Choice(top_k=top_k, **how), {name: jnp.asarray(rng.normal(size=experts), jnp.float32)
                                                for name in optional}  # fmt: skip


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (60, 4)])
def test_it_computes_the_formula(implementation, kind, experts, top_k):
    logits, choice, optional = case(kind, experts, top_k)
    z = np.float64(logits) + np.float64(optional.get("bias", 0))
    scores = {
        "softmax": lambda: np.exp(z) / np.exp(z).sum(axis=1, keepdims=True),
        "sigmoid": lambda: 1 / (1 + np.exp(-z)),
        "sqrt-softplus": lambda: np.sqrt(np.log1p(np.exp(z))),
        "chosen-softmax": lambda: z,
    }[choice.score]()
    ranked = np.float32(scores) + np.float32(optional.get("correction", 0))
    # Ties that float64 does not have: the lowest index among equal logits comes first in both.
    want_ids = np.argsort(-ranked, axis=1, kind="stable")[:, :top_k]
    want = np.take_along_axis(scores, want_ids, axis=1)
    if choice.score == "chosen-softmax":
        want = np.exp(want) / np.exp(want).sum(axis=1, keepdims=True)
    if choice.normalize:
        want = want / (want.sum(axis=1, keepdims=True) + choice.eps)
    want = want * choice.scale
    ids, weights = router_choice(
        logits, ACTIVE, choice=choice, **optional, implementation=implementation, interpret=True
    )
    np.testing.assert_array_equal(ids[1], -1)
    np.testing.assert_array_equal(ids[::2], want_ids[::2])
    np.testing.assert_allclose(weights, want, rtol=2**-8 if choice.rounded_to == BF16 else 2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (60, 4)])
def test_the_kernel_agrees_with_the_reference(kind, experts, top_k):
    logits, choice, optional = case(kind, experts, top_k)
    call = partial(router_choice, logits, ACTIVE, choice=choice, **optional, interpret=True)
    (ids, weights), (want_ids, want) = (call(implementation=name) for name in ("gpu", "xla"))
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want, rtol=2**-7 if choice.rounded_to == BF16 else 1e-6)


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
def test_recorded_routing_replaces_the_choice(implementation):
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, 8, (5, 2, 3)), jnp.int32)
    weights = jnp.asarray(rng.uniform(size=(5, 2, 3)), jnp.float32)
    logits = jnp.asarray(rng.normal(size=(2, 8)), jnp.float32)
    found, shares = router_choice(
        logits, jnp.array([True, False]), choice=Choice(top_k=3, score="softmax"),
        recorded=Recorded(ids, weights, jnp.int32(4), jnp.int32(1)), implementation=implementation, interpret=True,
    )  # fmt: skip
    np.testing.assert_array_equal(found, [ids[4, 1], [-1, -1, -1]])
    np.testing.assert_array_equal(shares, [weights[4, 1]] * 2)


def test_more_experts_than_the_kernel_takes_are_refused():
    choice = Choice(top_k=17, score="softmax")
    with pytest.raises(ValueError, match=r"17 of 64 experts \(at most 16 of 512 are chosen\)"):
        router_choice(jnp.zeros((1, 64)), jnp.ones(1, bool), choice=choice, implementation="gpu")


@pytest.mark.parametrize(("experts", "top_k"), [(32, 4), (128, 8), (512, 10)])
def test_it_lowers_without_the_hardware(experts, top_k):
    logits = jax.ShapeDtypeStruct((4, experts), jnp.float32)
    active, extra = jax.ShapeDtypeStruct((4,), bool), jax.ShapeDtypeStruct((experts,), jnp.float32)
    for score in get_args(Score):
        choice = Choice(top_k=top_k, score=score, normalize=True, rounded_to=BF16)
        call = partial(router_choice, choice=choice, implementation="gpu")
        text = lower_for("cuda", lambda a, b, c, call=call: call(a, b, bias=c, correction=c), logits, active, extra)
        assert "router_choice" in text
    recorded = (*(jax.ShapeDtypeStruct((9, 2, top_k), dtype) for dtype in (jnp.int32, jnp.float32)),
                jax.ShapeDtypeStruct((), jnp.int32))  # fmt: skip
    lower_for("cuda", lambda a, b, *c: call(a, b, recorded=Recorded(*c, jnp.int32(1))), logits, active, *recorded)
