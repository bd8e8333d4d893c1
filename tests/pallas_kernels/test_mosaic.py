"""The decode kernels with Mosaic GPU: what they compute, interpreted, and that every JAX lowers them for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused_moe import mosaic as moe
from pallas_kernels.fused_moe.reference import fused_moe
from pallas_kernels.layout import swiglu_layout
from pallas_kernels.matvec.mosaic import matvec
from tests.pallas_kernels.experts import random_slots
from tests.pallas_kernels.lowering import lower_for

BF16 = np.dtype(jnp.bfloat16)
LAYOUT = swiglu_layout(hidden=512, width=256, dtype=BF16)
interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="JAX before 0.11 cannot interpret Mosaic kernels"
)


def interpreter():
    return plgpu.InterpretGPUParams(detect_races=True)


@interpreted
@pytest.mark.parametrize("rows", [4, 16])
def test_matvec_is_the_product_in_float32_rounded_once(rows):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=512).astype(BF16), rng.normal(size=(32, 512)).astype(BF16)
    actual = matvec(jnp.asarray(x), jnp.asarray(w), rows=rows, interpret=interpreter())
    np.testing.assert_allclose(np.float32(actual), np.float32(w) @ np.float32(x), rtol=2**-8, atol=1e-4)


@interpreted
def test_the_projections_are_the_reference_and_skip_inactive_routes():
    rng = np.random.default_rng(1)
    layout, slots, _ = random_slots(512, 256, BF16, slots=5)
    slots = jnp.asarray(slots)
    x = jnp.asarray(rng.normal(size=(2, 512)), jnp.bfloat16)
    ids = jnp.array([[3, 0, -1], [4, 3, 1]], jnp.int32)
    weights = jnp.asarray(rng.random((2, 3)), jnp.float32)
    expected = fused_moe(x, slots, ids, weights, layout=layout)
    weights = weights.at[0, 2].set(jnp.nan)  # must not matter
    ids, weights = ids.reshape(-1), weights.reshape(-1)
    h = moe.project_up(x, slots, ids, layout=layout, rows=64, interpret=interpreter())
    actual = moe.project_down(h, slots, ids, weights, 2, layout=layout, rows=128, interpret=interpreter())
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_all_kernels_lower_for_cuda():
    def layer(x, w, slots, ids, weights):
        h = moe.project_up(matvec(x, w)[None], slots, ids, layout=LAYOUT)
        return moe.project_down(h, slots, ids, weights, 1, layout=LAYOUT)

    shapes = (
        ((512,), BF16),
        ((512, 512), BF16),
        ((5, LAYOUT.block_elems), np.uint16),
        ((3,), np.int32),
        ((3,), np.float32),
    )
    text = lower_for("cuda", layer, *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes))
    assert text.count("@mosaic_gpu_v2") == 3


@pytest.mark.parametrize(("shape", "rows"), [((32, 300), 8), ((30, 256), 4), ((32, 256), 6)])
def test_matvec_says_which_shapes_it_takes(shape, rows):
    with pytest.raises(ValueError, match="multiple of 256"):
        matvec(jnp.zeros(shape[1], BF16), jnp.zeros(shape, BF16), rows=rows)


def test_the_projections_say_which_experts_they_take():
    other = swiglu_layout(hidden=512, width=256, dtype=np.float16)
    with pytest.raises(ValueError, match="bf16 experts"):
        moe.project_up(jnp.zeros((1, 512), BF16), jnp.zeros((2, other.block_elems), np.uint16), jnp.zeros(3, jnp.int32),
                       layout=other)  # fmt: skip
