"""Claims about the decode MoE: every implementation computes the formula, whatever slots are used."""

from __future__ import annotations

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts import BF16, E2M1, EXTRAS, F16, F32, REAL_SHAPES, error, oracle, random_slots, real_layout
from lowering import lower_for

from pallas_kernels.fused_moe import FusedMoEConfig, fused_moe
from pallas_kernels.fused_moe.config import default_config
from pallas_kernels.fused_moe.swiglu import fp4_values, powers_of_two
from pallas_kernels.layout import FP4, FP8, swiglu_layout

# dtype of the expert, dtype of x, H, F. FP8 shapes: one ragged block, several whole blocks, ragged last ones.
# And what there is a scale for, where it is not what FP8 has by itself.
CASES = [
    (F32, F32, 64, 32),
    (BF16, BF16, 192, 80),
    (F16, BF16, 64, 48),
    (FP8, BF16, 192, 80),
    (FP8, BF16, 256, 128),
    (FP8, F32, 160, 136),
    (BF16, F32, 64, 48),
    (FP4, BF16, 192, 96),
    (FP4, F32, 64, 160),
    (FP8, BF16, 192, 80, "channel"),
    (FP8, F32, 160, 136, "channel"),
    (BF16, BF16, 192, 80, "block"),
    (BF16, BF16, 256, 128, "channel"),
    (F32, F32, 160, 136, "block"),
]
CASES = [(*given, None)[:5] for given in CASES]
IDS = [f"{expert.name}-x_{x.name}-{hidden}x{width}-{scales}" for expert, x, hidden, width, scales in CASES]
SLOT_IDS = {1: [[3, -1, 0]], 2: [[3, -1, 0], [2, 1, 4]]}


def case(dtype, x_dtype, hidden, width, *, scales=None, batch, slots=5):
    layout, blocks, tensors = random_slots(
        hidden, width, dtype, slots=slots, scales=scales, **EXTRAS.get((dtype, x_dtype), {})
    )
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(batch, hidden)).astype(x_dtype))
    weights = jnp.asarray(rng.uniform(0.1, 1, (batch, 3)), jnp.float32)
    return layout, tensors, (x, blocks, jnp.asarray(SLOT_IDS[batch], jnp.int32), weights)


@cache  # one compilation per implementation and shape, over all tests
def compiled(implementation, layout, config=None):
    interpret = implementation != "xla"
    f = partial(fused_moe, layout=layout, implementation=implementation, interpret=interpret, config=config)
    return jax.jit(f)


def run(implementation, layout, args, config=None):
    return compiled(implementation, layout, config)(*args)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("dtype", "x_dtype", "hidden", "width", "scales"), CASES, ids=IDS)
def test_reference_computes_the_formula(dtype, x_dtype, hidden, width, scales, batch):
    layout, tensors, (x, blocks, ids, weights) = case(dtype, x_dtype, hidden, width, scales=scales, batch=batch)
    want = np.zeros((batch, hidden))
    for b, k in np.argwhere(np.asarray(ids) >= 0):
        y = oracle(tensors[ids[b, k]], np.asarray(x[b]), round_hidden=x_dtype == BF16, activation=layout.activation)
        want[b] += float(weights[b, k]) * y
    got = run("xla", layout, (x, blocks, ids, weights))
    assert got.dtype == jnp.float32
    # Rounding the hidden values to bf16 from slightly different float32 sums may go the other way.
    assert error(got, want) < (1e-3 if x_dtype == BF16 else 1e-6)


@pytest.mark.parametrize("implementation", ["gpu", "tpu"])
@pytest.mark.parametrize(("dtype", "x_dtype", "hidden", "width", "scales"), CASES, ids=IDS)
def test_kernels_agree_with_the_reference(dtype, x_dtype, hidden, width, scales, implementation):
    if implementation == "tpu" and width > 128 and width % 128:
        pytest.skip("the TPU kernel takes whole tiles of 128")
    if implementation == "tpu" and (dtype == FP4 or "bias" in EXTRAS.get((dtype, x_dtype), {})):
        pytest.skip("the TPU kernel refuses them")
    layout, _, args = case(dtype, x_dtype, hidden, width, scales=scales, batch=2)
    assert error(run(implementation, layout, args), run("xla", layout, args)) < (1e-3 if x_dtype == BF16 else 2e-6)


def test_any_block_shape_gives_the_same_for_fp4():
    layout, _, args = case(FP4, BF16, 192, 96, batch=2)
    config = FusedMoEConfig(up_rows=4, up_cols=64, down_rows=8, down_cols=32)
    assert error(run("gpu", layout, args, config=config), run("xla", layout, args)) < 1e-3


@pytest.mark.parametrize(
    "config",
    [
        FusedMoEConfig(up_rows=1, up_cols=128, down_rows=4, down_cols=128, fp8="bits"),
        FusedMoEConfig(up_rows=8, up_cols=256, up_warps=4, down_rows=16, down_cols=256, down_warps=1),
    ],
)
def test_any_block_shape_gives_the_same(config):
    layout, _, args = case(FP8, F32, 192, 83, batch=1)  # an odd F: rows masked too
    assert error(run("gpu", layout, args, config=config), run("xla", layout, args)) < 2e-6


@pytest.mark.parametrize("implementation", ["xla", "gpu", "tpu"])
def test_slots_do_not_matter_to_the_bit(implementation):
    layout, _, (x, blocks, ids, weights) = case(FP8, BF16, 256, 128, batch=2)
    order = np.asarray([4, 2, 0, 1, 3])  # expert in slot order[i] moves to slot i
    moved = jnp.where(ids >= 0, jnp.asarray(np.argsort(order))[ids], -1)
    at_home = run(implementation, layout, (x, blocks, ids, weights))
    np.testing.assert_array_equal(at_home, run(implementation, layout, (x, blocks[order], moved, weights)))


def test_a_token_gets_the_same_bits_in_any_row_of_a_batch():
    layout, _, (x, blocks, ids, weights) = case(FP8, BF16, 256, 128, batch=2)
    both = run("gpu", layout, (x, blocks, ids, weights))
    swapped = run("gpu", layout, (x[::-1], blocks, ids[::-1], weights[::-1]))
    np.testing.assert_array_equal(both, swapped[::-1])
    alone = run("gpu", layout, (x[1:], blocks, ids[1:], weights[1:]))
    np.testing.assert_array_equal(both[1:], alone)


@pytest.mark.parametrize("implementation", ["xla", "gpu", "tpu"])
def test_inactive_routes_contribute_nothing_even_beside_nan(implementation):
    layout, _, (x, blocks, ids, weights) = case(F32, F32, 64, 32, batch=2)
    clean = run(implementation, layout, (x, blocks, ids, weights))
    # Where a careless clamp of -1 would read, and what it would be multiplied by.
    poisoned = blocks.at[0].set(np.float32(np.nan).view(np.uint32))
    ids = jnp.asarray([[3, -1, -1], [2, 1, 4]], jnp.int32)
    got = run(implementation, layout, (x, poisoned, ids, jnp.where(ids >= 0, weights, jnp.nan)))
    want = run(implementation, layout, (x, blocks, ids, jnp.where(ids >= 0, weights, 0)))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got[1], clean[1])
    none = run(implementation, layout, (x, poisoned, jnp.full_like(ids, -1), weights))
    np.testing.assert_array_equal(none, jnp.zeros_like(none))


def test_e2m1_codes_and_powers_of_two_are_exact():
    codes = jnp.arange(16, dtype=jnp.uint8)
    np.testing.assert_array_equal(fp4_values(codes | 0xA0), E2M1)
    assert np.signbit(np.asarray(fp4_values(codes)))[8:].all()
    exponents = jnp.asarray([1, 126, 127, 128, 254], jnp.uint8)
    np.testing.assert_array_equal(powers_of_two(exponents), 2.0 ** (np.asarray(exponents, np.float32) - 127))


def test_fp4_layouts_have_the_published_size():
    layout = real_layout("gpt-oss-mxfp4")
    assert layout.block_bytes == sum(field.nbytes for field in layout.fields) == 13_236_480
    with pytest.raises(ValueError, match="multiples of 32, got H=64, F=48"):
        swiglu_layout(hidden=64, width=48, dtype=FP4)


@pytest.mark.parametrize("code", [0x01, 0x07, 0x08, 0x7E, 0x81, 0xFE, 0x00])
def test_e4m3_bits_are_exact(code):
    from pallas_kernels.fused_moe.dequantize import fp8_unit, fp8_units

    byte = jnp.asarray([code], jnp.uint8)
    bits = fp8_units(byte, "bits", inline=False).astype(jnp.float32) * fp8_unit("bits")
    np.testing.assert_array_equal(bits, np.asarray(fp8_units(byte, "convert", inline=False), np.float32))


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_reference_makes_no_array_of_the_slots_size(dtype):
    layout, _, args = case(dtype, BF16, 192, 80, batch=1, slots=37)
    text = jax.jit(partial(fused_moe, layout=layout, implementation="xla")).lower(*args).compile().as_text()
    computation, made = "", []
    for line in text.splitlines():
        computation = line if line and not line.startswith(" ") else computation
        # Inside a fusion nothing is stored.
        if re.search(r"= \w+\[37,", line) and "fused" not in computation and "wrapped" not in computation:
            made += [line] if not re.search(r" (parameter|get-tuple-element|bitcast|tuple)\(", line) else []
    assert not made


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", REAL_SHAPES)
def test_gpu_kernel_lowers_for_real_shapes(name, batch):
    per_token, hidden, _, _ = REAL_SHAPES[name]
    layout = real_layout(name)
    args = shapes(batch, per_token, hidden, layout)
    text = lower_for("cuda", partial(fused_moe, layout=layout, implementation="gpu"), *args)
    assert text.count("__gpu$xla.gpu.triton") == 2


@pytest.mark.parametrize("mode", ["convert", "bits"])
def test_gpu_kernel_lowers_for_ragged_fp8(mode):
    layout = swiglu_layout(hidden=320, width=200, dtype=FP8)
    config = FusedMoEConfig(up_cols=256, down_cols=256, fp8=mode)
    lower_for(
        "cuda",
        partial(fused_moe, layout=layout, implementation="gpu", config=config),
        *shapes(1, 4, 320, layout),
    )


@pytest.mark.parametrize("name", ["peer", "qwen3-30b-fp8", "qwen3-30b-fp8-channel", "qwen3-30b-partly-fp8"])
def test_tpu_kernel_lowers_for_aligned_shapes(name):
    per_token, hidden, _, _ = REAL_SHAPES[name]
    layout = real_layout(name)
    text = lower_for(
        "tpu", partial(fused_moe, layout=layout, implementation="tpu"), *shapes(1, per_token, hidden, layout)
    )
    assert "tpu_custom_call" in text


def shapes(batch, per_token, hidden, layout, slots=64):
    return (
        jax.ShapeDtypeStruct((batch, hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct((slots, layout.block_elems), layout.storage),
        jax.ShapeDtypeStruct((batch, per_token), jnp.int32),
        jax.ShapeDtypeStruct((batch, per_token), jnp.float32),
    )


@pytest.mark.parametrize("name", REAL_SHAPES)
def test_default_block_shapes_fit_and_keep_enough_in_flight(name):
    per_token, hidden, width, dtype = REAL_SHAPES[name]
    layout = swiglu_layout(hidden=hidden, width=width, dtype=dtype)
    config = default_config(layout, per_token)
    config.check(layout)
    up = config.up_rows * 2 * hidden * dtype.itemsize / (32 * config.up_warps)
    down = config.down_rows * per_token * width * dtype.itemsize / (32 * config.down_warps)
    if name != "demo":
        # Bytes of weights that a thread asks for: enough to hide memory's latency, and registers to hold them.
        assert 180 <= up <= 512
        assert 90 <= down <= 512


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
def test_slots_may_be_counted_from_any_of_them(implementation):
    layout, _, (x, blocks, ids, weights) = case(BF16, BF16, 192, 80, batch=2)
    how = {"layout": layout, "implementation": implementation, "interpret": implementation != "xla"}
    expected = fused_moe(x, blocks, ids, weights, **how)
    moved = jnp.roll(blocks, 2, axis=0)
    moved = jnp.concatenate([moved, moved[:2]])  # slot 0 is now slot 2
    np.testing.assert_array_equal(fused_moe(x, moved, ids, weights, first_slot=jnp.int32(2), **how), expected)


def test_unaligned_tpu_shapes_are_refused():
    layout, _, args = case(BF16, BF16, 192, 80, batch=1)
    with pytest.raises(ValueError, match="multiples of 128, got H=192, F=80"):
        fused_moe(*args, layout=layout, implementation="tpu")


@pytest.mark.parametrize("extras", [{"dtype": FP4}, {"dtype": BF16, "bias": BF16}])
def test_tpu_kernels_refuse_what_they_do_not_compute(extras):
    layout = swiglu_layout(hidden=128, width=128, **extras)
    with pytest.raises(ValueError, match="no FP4 experts and no biases: choose implementation 'xla'"):
        jax.eval_shape(partial(fused_moe, layout=layout, implementation="tpu"), *shapes(1, 2, 128, layout))


def test_other_layouts_slots_are_refused():
    _, _, args = case(BF16, BF16, 192, 80, batch=1)
    with pytest.raises(ValueError, match=r"layout expects x\[B, 64\]"):
        fused_moe(*args, layout=swiglu_layout(hidden=64, width=80, dtype=BF16), implementation="xla")
