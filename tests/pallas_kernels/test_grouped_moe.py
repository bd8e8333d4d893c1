"""Claims about the prefill MoE: blocks hold every route once; splitting a layer up changes no result."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts import BF16, EXTRAS, F16, F32, REAL_SHAPES, error, oracle, random_slots, real_layout
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering import lower_for

from pallas_kernels.fused_moe import fused_moe
from pallas_kernels.grouped_moe import assign_blocks, combine, grouped_moe
from pallas_kernels.grouped_moe.blocks import num_blocks
from pallas_kernels.layout import FP4, FP8

CASES = [
    (F32, F32, 64, 48),
    (BF16, BF16, 192, 80),
    (F16, BF16, 64, 48),
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
EXPERTS, TOKENS, PER_TOKEN, ROWS = 4, 21, 2, 16
UNTOUCHED = 7.0


def case(dtype, x_dtype, hidden, width, scales=None):
    layout, blocks, tensors = random_slots(
        hidden, width, dtype, slots=EXPERTS, scales=scales, **EXTRAS.get((dtype, x_dtype), {})
    )
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(TOKENS, hidden)).astype(x_dtype))
    ids = np.stack([rng.permutation(EXPERTS)[:PER_TOKEN] for _ in range(TOKENS)])
    ids[-1] = -1
    block_expert, block_rows, place = assign_blocks(jnp.asarray(ids), num_experts=EXPERTS, rows=ROWS)
    out = jnp.full((*block_rows.shape, hidden), UNTOUCHED, jnp.float32)
    return layout, tensors, ids, place, (out, x, blocks, block_expert, block_rows)


@cache  # one compilation per implementation and shape, over all tests
def compiled(implementation, layout):
    return jax.jit(
        partial(grouped_moe, layout=layout, implementation=implementation, interpret=implementation != "xla")
    )


def run(implementation, layout, args):
    return compiled(implementation, layout)(*args)


@pytest.mark.parametrize(("dtype", "x_dtype", "hidden", "width", "scales"), CASES, ids=IDS)
def test_reference_computes_the_formula(dtype, x_dtype, hidden, width, scales):
    layout, tensors, _, _, args = case(dtype, x_dtype, hidden, width, scales)
    _, x, _, block_expert, block_rows = args
    got = np.asarray(run("xla", layout, args))
    want = np.zeros_like(got)
    want[np.asarray(block_expert) < 0] = UNTOUCHED
    for n, m in np.argwhere((np.asarray(block_rows) >= 0) & (np.asarray(block_expert) >= 0)[:, None]):
        expert = tensors[block_expert[n]]
        want[n, m] = oracle(
            expert, np.asarray(x[block_rows[n, m]]), round_hidden=x_dtype == BF16, activation=layout.activation
        )
    np.testing.assert_array_equal(got[np.asarray(block_expert) < 0], UNTOUCHED)
    used = np.asarray(block_expert) >= 0
    assert error(got[used], want[used]) < (1e-3 if x_dtype == BF16 else 1e-6)


@pytest.mark.parametrize("implementation", ["gpu", "tpu"])
@pytest.mark.parametrize(("dtype", "x_dtype", "hidden", "width", "scales"), CASES, ids=IDS)
def test_kernels_agree_with_the_reference(dtype, x_dtype, hidden, width, scales, implementation):
    if implementation == "tpu" and width > 128 and width % 128:
        pytest.skip("the TPU kernel takes whole tiles of 128")
    if implementation == "tpu" and (dtype == FP4 or "bias" in EXTRAS.get((dtype, x_dtype), {})):
        pytest.skip("the TPU kernel refuses them")
    layout, _, _, _, args = case(dtype, x_dtype, hidden, width, scales)
    used = np.asarray(args[3]) >= 0
    got, want = np.asarray(run(implementation, layout, args)), np.asarray(run("xla", layout, args))
    assert error(got[used], want[used]) < (1e-3 if x_dtype == BF16 else 2e-6)
    np.testing.assert_array_equal(got[~used], UNTOUCHED)


@pytest.mark.parametrize("implementation", ["xla", "gpu", "tpu"])
def test_splitting_a_layer_into_calls_changes_no_bit(implementation):
    layout, _, _, _, (out, x, blocks, block_slots, block_rows) = case(FP8, BF16, 256, 128)
    whole = run(implementation, layout, (out, x, blocks, block_slots, block_rows))
    for experts in ([0, 2], [3], [], [1]):
        chosen = jnp.where(jnp.isin(block_slots, jnp.asarray(experts, jnp.int32)), block_slots, -1)
        out = run(implementation, layout, (out, x, blocks, chosen, block_rows))
    np.testing.assert_array_equal(out, whole)


@pytest.mark.parametrize("implementation", ["xla", "gpu", "tpu"])
def test_neither_slots_nor_block_order_change_a_bit(implementation):
    layout, _, _, _, (out, x, blocks, block_slots, block_rows) = case(FP8, BF16, 256, 128)
    home = run(implementation, layout, (out, x, blocks, block_slots, block_rows))
    order = np.asarray([2, 0, 3, 1])
    moved = jnp.where(block_slots >= 0, jnp.asarray(np.argsort(order))[block_slots], -1)
    turned = run(implementation, layout, (out, x, blocks[order], moved[::-1], block_rows[::-1]))
    np.testing.assert_array_equal(turned[::-1], home)


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
def test_combined_blocks_equal_the_decode_kernel(implementation):
    layout, _, ids, place, args = case(BF16, BF16, 192, 80)
    weights = jnp.asarray(np.random.default_rng(2).uniform(size=ids.shape), jnp.float32)
    got = combine(run(implementation, layout, args), place, weights)
    want = fused_moe(args[1], args[2], jnp.asarray(ids), weights, layout=layout, implementation="xla")
    assert error(got, want) < 1e-3
    np.testing.assert_array_equal(got[-1], jnp.zeros_like(got[-1]))


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_reference_updates_in_place_and_copies_no_slots(dtype):
    layout, _, _, _, args = case(dtype, BF16, 192, 80)
    f = jax.jit(partial(grouped_moe, layout=layout, implementation="xla"), donate_argnums=0)
    text = f.lower(*args).compile().as_text()
    elements = f"[{EXPERTS},{layout.block_elems}]"
    entry = [line for line in text.splitlines() if "fusion(" in line or "copy(" in line or "convert(" in line]
    stored = [line for line in entry if line.strip().startswith(("%wrapped", "%copy", "ROOT %wrapped"))]
    assert not [line for line in stored if elements in line.split("=")[1].split("(")[0]]
    assert not [line for line in stored if "copy(" in line and f"f32[{args[0].shape[0]},{ROWS}," in line]
    out = args[0]
    f(*args)
    assert out.is_deleted()


@settings(max_examples=20, deadline=None)
@given(data=st.data(), rows=st.sampled_from([4, 16]), experts=st.sampled_from([3, 8]))
def test_blocks_hold_every_route_once_in_order(data, rows, experts):
    tokens, per_token = 13, 2
    line = st.permutations(range(experts)).map(lambda order: order[:per_token])
    lines = st.lists(st.one_of(line, st.just([-1] * per_token)), min_size=tokens, max_size=tokens)
    ids = np.asarray(data.draw(lines))
    block_expert, block_rows, place = map(
        np.asarray, jit_assign(jnp.asarray(ids, jnp.int32), num_experts=experts, rows=rows)
    )
    total = num_blocks(tokens, per_token, num_experts=experts, rows=rows)
    assert block_expert.shape == (total,)
    assert block_rows.shape == (total, rows)
    np.testing.assert_array_equal(place >= 0, ids >= 0)
    # Every route's place names its token and its expert, and no two routes share one.
    where = place[place >= 0]
    assert len(set(where)) == len(where)
    token, _ = np.nonzero(ids >= 0)
    np.testing.assert_array_equal(block_rows.reshape(-1)[where], token)
    np.testing.assert_array_equal(block_expert[where // rows], ids[ids >= 0])
    assert (block_rows >= 0).sum() == len(where)
    # Experts ascend, tokens ascend within an expert, only the last block of an expert is padded.
    used = block_expert[block_expert >= 0]
    assert (block_expert[len(used) :] == -1).all()
    assert (np.diff(used) >= 0).all()
    for expert in range(experts):
        held = block_rows[block_expert == expert].reshape(-1)
        count = (ids == expert).sum()
        assert (held[count:] == -1).all()
        assert len(held) - count < rows
        assert (np.diff(held[:count]) > 0).all()


jit_assign = jax.jit(assign_blocks, static_argnames=("num_experts", "rows"))


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("name", REAL_SHAPES)
def test_gpu_kernel_lowers_for_real_shapes(name, rows):
    text = lower_for("cuda", *lowering_case(name, "gpu", rows), donate=(0,))
    assert text.count("__gpu$xla.gpu.triton") == 2


@pytest.mark.parametrize("name", ["peer", "qwen3-30b-fp8", "qwen3-30b-fp8-channel", "qwen3-30b-partly-fp8"])
def test_tpu_kernel_lowers_for_aligned_shapes(name):
    assert "tpu_custom_call" in lower_for("tpu", *lowering_case(name, "tpu", 16), donate=(0,))


def lowering_case(name, implementation, rows, blocks=40):
    hidden = REAL_SHAPES[name][1]
    layout = real_layout(name)
    return (
        partial(grouped_moe, layout=layout, implementation=implementation),
        jax.ShapeDtypeStruct((blocks, rows, hidden), jnp.float32),
        jax.ShapeDtypeStruct((512, hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct((64, layout.block_elems), layout.storage),
        jax.ShapeDtypeStruct((blocks,), jnp.int32),
        jax.ShapeDtypeStruct((blocks, rows), jnp.int32),
    )
