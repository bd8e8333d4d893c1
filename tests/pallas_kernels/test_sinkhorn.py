"""Claims about Sinkhorn and Knopp's iteration: doubly stochastic, and the kernel computes what the reference does."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import lower_for

from pallas_kernels.sinkhorn import sinkhorn

HOW = {"iterations": 20, "eps": 1e-6}


def logits(tokens, streams):
    return jnp.asarray(np.random.default_rng(tokens).standard_normal((tokens, streams, streams)) * 3, jnp.float32)


@pytest.mark.parametrize("streams", [3, 4])
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_kernel_is_the_reference_and_doubly_stochastic(tokens, streams):
    matrices = logits(tokens, streams)
    expected = sinkhorn(matrices, **HOW, implementation="xla")
    actual = sinkhorn(matrices, **HOW, implementation="gpu", interpret=True)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    np.testing.assert_allclose(actual.sum(1), 1, atol=1e-4)
    np.testing.assert_allclose(actual.sum(2), 1, atol=1e-2)


def test_it_is_one_launch_on_a_gpu():
    text = lower_for("cuda", partial(sinkhorn, **HOW, implementation="gpu"), logits(1024, 4))
    assert text.count("__gpu$xla.gpu.triton") == 1
    assert "while" not in text


def test_matrices_that_the_kernel_does_not_take_are_computed_nevertheless():
    assert "triton" not in str(jax.make_jaxpr(partial(sinkhorn, **HOW, implementation="gpu"))(logits(2, 3)))
