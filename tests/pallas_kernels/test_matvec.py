"""Claims about the matrix-vector product: the kernel is norm, linear map and addition, whatever the batch."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import lower_for

from pallas_kernels.matvec import MatvecConfig, matvec
from seqmoe_jax.models.norms import RMSNorm

NORMS = {
    "none": None,
    "early": RMSNorm(eps=1e-6),
    "late": RMSNorm(eps=1e-5, rounding="late"),
    "zero": RMSNorm(eps=1e-6, zero_centered=True),
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
OPTIONAL = {
    "everything": ("bias", "residual", "addend"),
    "nothing": (),
    "a bias": ("bias",),
    "a residual": ("residual",),
    "an addend": ("addend",),
}


def arrays(batch, outputs, width, dtype, optional=OPTIONAL["everything"]):
    rng = np.random.default_rng(outputs + width)
    shapes = {"x": (batch, width), "w": (outputs, width), "bias": (outputs,), "norm_weight": (width,)}
    shapes["residual"] = (batch, outputs)
    drawn = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}
    drawn["addend"] = jnp.asarray(rng.normal(size=(batch, width)), jnp.float32)
    return {name: a for name, a in drawn.items() if name in ("x", "w", "norm_weight", *optional)}


@cache
def compiled(implementation, norm="none", config=None, scale=1.0):
    f = partial(matvec, norm=NORMS[norm], residual_scale=scale, implementation=implementation, config=config)
    return jax.jit(lambda a: f(**a, interpret=True))


def close(got, want, dtype, width):
    for a, b, of_sum in zip(got, want, (True, False, False), strict=True):
        tolerance = TOLERANCE[dtype]
        atol = tolerance * (width**0.5 if of_sum else 1)
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=tolerance, atol=atol)


@pytest.mark.parametrize("norm", NORMS)
def test_the_reference_computes_the_formula(norm):
    a = {name: np.asarray(x, np.float64) for name, x in arrays(3, 37, 200, "float32").items()}
    x = a["x"] + a["addend"]
    normed, eps = x, getattr(NORMS[norm], "eps", None)
    if eps is not None:
        weight = a["norm_weight"] + (norm == "zero")
        normed = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * weight
    want = a["residual"] + 0.5 * (normed @ a["w"].T + a["bias"]), normed, x
    close(compiled("xla", norm, scale=0.5)(arrays(3, 37, 200, "float32")), want, "float32", 200)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("batch", "outputs", "width"), [(1, 48, 64), (3, 37, 200), (2, 16, 4096)])
@pytest.mark.parametrize("norm", NORMS)
def test_the_kernel_agrees_with_the_reference(dtype, batch, outputs, width, norm):
    a = arrays(batch, outputs, width, dtype)
    got, want = (compiled(name, norm, scale=0.5)(a) for name in ("gpu", "xla"))
    np.testing.assert_array_equal(np.float32(got.x), np.float32(want.x))
    close(got, want, dtype, width)


@pytest.mark.parametrize("optional", OPTIONAL)
def test_every_operand_may_be_left_out(optional):
    a = arrays(2, 30, 96, "float32", OPTIONAL[optional])
    close(compiled("gpu", "early")(a), compiled("xla", "early")(a), "float32", 96)


def test_a_vector_alone_gives_what_it_gives_among_others():
    a = arrays(4, 32, 128, "bfloat16", ())
    run = compiled("gpu", "early")
    together = run(a).out
    for b in range(4):
        np.testing.assert_array_equal(np.float32(run(a | {"x": a["x"][b : b + 1]}).out[0]), np.float32(together[b]))


@pytest.mark.parametrize("config", [MatvecConfig(rows=4, cols=32, warps=1), MatvecConfig(rows=1, cols=256, warps=2)])
def test_block_shapes_change_nothing_but_the_order_of_sums(config):
    a = arrays(2, 30, 200, "float32", ())
    close(compiled("gpu", config=config)(a), compiled("gpu")(a), "float32", 200)


def test_unfit_inputs_are_refused():
    with pytest.raises(ValueError, match=r"9 vectors \(1 to 8 are needed\)"):
        matvec(jnp.zeros((9, 32)), jnp.zeros((4, 32)), implementation="gpu")
    with pytest.raises(ValueError, match="power of two"):
        MatvecConfig(rows=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("batch", "outputs", "width"), [(1, 5120, 2048), (8, 2048, 4096), (4, 128, 2880), (2, 40, 64)])
def test_it_lowers_without_the_hardware(dtype, batch, outputs, width):
    a = jax.eval_shape(partial(arrays, batch, outputs, width, dtype))
    call = partial(matvec, norm=NORMS["early"], implementation="gpu")
    assert "matvec" in lower_for("cuda", lambda a: call(**a), a)
