"""Claims about the matrix-vector kernel: the same as norm, linear map and addition, whatever the batch."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import lower_for

from pallas_kernels.matvec import MatvecConfig
from pallas_kernels.matvec.gpu import matvec
from seqmoe_jax.models.layers import linear
from seqmoe_jax.models.norms import RMSNorm

NORMS = {"early": RMSNorm(eps=1e-6), "late": RMSNorm(eps=1e-5, rounding="late"), "zero": RMSNorm(eps=1e-6, centre=0)}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def arrays(batch, outputs, width, dtype):
    rng = np.random.default_rng(outputs + width)
    shapes = {"x": (batch, width), "w": (outputs, width), "bias": (outputs,), "norm_weight": (width,)}
    shapes["residual"] = (batch, outputs)
    drawn = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}
    return drawn | {"addend": jnp.asarray(rng.normal(size=(batch, width)), jnp.float32)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("batch", "outputs", "width"), [(1, 48, 64), (3, 37, 200), (2, 16, 4096)])
@pytest.mark.parametrize("norm", [None, "early", "late", "zero"])
def test_it_is_norm_and_linear_map_and_residual(dtype, batch, outputs, width, norm):
    a = arrays(batch, outputs, width, dtype)
    whole = a["x"] + a["addend"].astype(dtype)
    normed = whole if norm is None else NORMS[norm](whole, a["norm_weight"])
    expected = a["residual"] + linear(normed, a["w"], a["bias"]) * jnp.asarray(0.5, dtype)
    actual, same, added = matvec(**a, norm=NORMS.get(norm), residual_scale=0.5, interpret=True)
    np.testing.assert_array_equal(np.float32(added), np.float32(whole))
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(np.float32(same), np.float32(normed), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(np.float32(actual), np.float32(expected), rtol=tolerance, atol=tolerance * width**0.5)


def test_a_vector_alone_gives_what_it_gives_among_others():
    a = arrays(4, 32, 128, "bfloat16")
    run = partial(matvec, w=a["w"], norm=NORMS["early"], norm_weight=a["norm_weight"], interpret=True)
    together = run(a["x"]).out
    for b in range(4):
        np.testing.assert_array_equal(np.float32(run(a["x"][b : b + 1]).out[0]), np.float32(together[b]))


@pytest.mark.parametrize("config", [MatvecConfig(rows=4, cols=32, warps=1), MatvecConfig(rows=1, cols=256, warps=2)])
def test_block_shapes_change_nothing_but_the_order_of_sums(config):
    a = arrays(2, 30, 200, "float32")
    expected = matvec(a["x"], a["w"], interpret=True).out
    actual = matvec(a["x"], a["w"], config=config, interpret=True).out
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_unfit_inputs_are_refused():
    with pytest.raises(ValueError, match=r"expected x\[B, 32\] with B of 1 to 8, got x\[9, 32\]"):
        matvec(jnp.zeros((9, 32)), jnp.zeros((4, 32)))
    with pytest.raises(ValueError, match="power of two"):
        MatvecConfig(rows=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("batch", "outputs", "width"), [(1, 5120, 2048), (8, 2048, 4096), (4, 128, 2880), (2, 40, 64)])
def test_it_lowers_without_the_hardware(dtype, batch, outputs, width):
    a = jax.eval_shape(partial(arrays, batch, outputs, width, dtype))
    call = partial(matvec, norm=NORMS["early"])
    assert "matvec" in lower_for("cuda", lambda a: call(**a), a)
