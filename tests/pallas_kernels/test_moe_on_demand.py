"""Claims about the decode MoE that loads what is missing: the same bits as loading first and computing then."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts import BF16, EXTRAS, F16, F32, REAL_SHAPES, random_slots, real_layout
from lowering import lower_for

from pallas_kernels.fused_moe import fused_moe, moe_on_demand, on_demand
from pallas_kernels.fused_moe.config import default_config
from pallas_kernels.fused_moe.on_demand import OnDemandConfig
from pallas_kernels.layout import FP4, FP8

CASES = {  # dtype of the expert, dtype of x, H, F; biases and other activations as EXTRAS says
    "f32": (F32, F32, 64, 32),
    "bf16": (BF16, BF16, 192, 80),
    "f16": (F16, BF16, 64, 48),
    "bf16, biased": (BF16, F32, 64, 48),
    "fp8": (FP8, BF16, 192, 80),
    "fp8 by channel": (FP8, BF16, 192, 80, "channel"),
    "fp8 in bf16": (BF16, BF16, 192, 80, "block"),
    "mxfp4, biased": (FP4, BF16, 192, 96),
}
# Slots of two tokens' routes (of the second alone where the batch is 1), and which experts go to which of them.
ROUTES = {
    "none": ([[3, -1, 0], [2, 1, 4]], {}),
    "some": ([[3, -1, 0], [2, 1, 4]], {1: 2, 0: 0}),
    "all": ([[3, -1, 0], [2, 1, 4]], {3: 1, 0: 3, 2: 0, 1: 2, 4: 4}),
    "one of both tokens": ([[3, -1, 4], [4, 1, 3]], {4: 2}),
    "one without a slot": ([[3, -1, 0], [-1, 1, 4]], {4: 3}),
}
UNEVEN = OnDemandConfig(loading_warps=3, bytes_per_warp=1024, late_programs=3)


def case(name, routes, batch):
    """Layout, what the function takes, and the slots as they are afterwards."""
    dtype, x_dtype, hidden, width, *scales = CASES[name]
    extras = EXTRAS.get((dtype, x_dtype), {}) | {"scales": next(iter(scales), None)}
    layout, slots, _ = random_slots(hidden, width, dtype, slots=6, **extras)
    pool = random_slots(hidden, width, dtype, slots=5, seed=1, **extras)[1]
    ids, loads = ROUTES[routes]
    ids = np.asarray(ids, np.int32)[-batch:]
    loads = {slot: expert for slot, expert in loads.items() if slot in ids}
    dst, experts = np.full((2, 3 * batch), -1, np.int32)
    dst[: len(loads)], experts[: len(loads)] = list(loads), list(loads.values())
    after = np.array(slots)
    for slot, expert in loads.items():
        after[slot] = pool[expert]
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(batch, hidden)).astype(x_dtype))
    weights = jnp.asarray(rng.uniform(0.1, 1, ids.shape), jnp.float32)
    args = (x, slots, jnp.asarray(ids), weights, pool, jnp.asarray(experts), jnp.asarray(dst))
    return layout, args, jnp.asarray(after)


@cache  # one compilation per layout, over all routes
def compiled(layout, sharing):
    return jax.jit(partial(on_demand.moe_on_demand, layout=layout, sharing=sharing, interpret=True))


@cache
def resident(layout, implementation):
    return jax.jit(partial(fused_moe, layout=layout, implementation=implementation, interpret=implementation != "xla"))


@pytest.mark.parametrize(("name", "batch"), [*((name, 2) for name in CASES), ("bf16", 1)])
def test_loading_meanwhile_gives_the_bits_of_resident_experts(name, batch):
    for routes in ROUTES:
        layout, args, after = case(name, routes, batch)
        slots, out = compiled(layout, UNEVEN)(*args)
        np.testing.assert_array_equal(slots, after, err_msg=f"slots, {routes}")
        x, _, ids, weights = args[:4]
        np.testing.assert_array_equal(out, resident(layout, "gpu")(x, after, ids, weights), err_msg=routes)


def test_what_is_missing_is_left_to_the_second_launch():
    # The interpreter runs the loading programs first, so only what was computed tells when it was.
    layout, (x, slots, ids, _, pool, experts, dst), after = case("bf16", "some", 2)
    how = dict(layout=layout, config=default_config(layout, 3), sharing=UNEVEN, interpret=True)
    slots, first = on_demand.load_and_project_up(x, slots, ids.reshape(-1), pool, experts, dst, **how)
    np.testing.assert_array_equal(slots, after)
    first = np.asarray(first, np.float32)
    hits, late = [0, 3, 5], [2, 4]  # of the routes 3, -1, 0, 2, 1, 4
    np.testing.assert_array_equal(np.flatnonzero(~np.isnan(first).any(1)), hits)
    np.testing.assert_array_equal(np.flatnonzero(~np.isnan(first).all(1)), hits)
    untouched = jnp.full(first.shape, jnp.nan, jnp.bfloat16)
    second = on_demand.project_up_late(x, after, ids.reshape(-1), dst, untouched, **how)
    np.testing.assert_array_equal(np.flatnonzero(~np.isnan(np.asarray(second, np.float32)).any(1)), late)


@pytest.mark.parametrize("implementation", ["xla", "gpu", "tpu"])
def test_every_implementation_loads_and_computes(implementation):
    layout, args, after = case("bf16", "some", 2)
    call = partial(moe_on_demand, layout=layout, implementation=implementation, interpret=implementation != "xla")
    slots, out = jax.jit(call)(*args)
    np.testing.assert_array_equal(slots, after)
    x, _, ids, weights = args[:4]
    np.testing.assert_array_equal(out, resident(layout, implementation)(x, after, ids, weights))


def test_a_pool_of_other_experts_is_refused():
    layout, args, _ = case("bf16", "some", 1)
    with pytest.raises(ValueError, match=r"rows like the slots, uint16\[E, 46080\], got uint8\[5, 46080\]"):
        moe_on_demand(*args[:4], args[4].astype(jnp.uint8), *args[5:], layout=layout, implementation="xla")


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", REAL_SHAPES)
def test_kernels_lower_for_real_shapes(name, batch):
    layout = real_layout(name)
    call = partial(moe_on_demand, layout=layout, implementation="gpu")
    text = lower_for("cuda", call, *shapes(layout, batch, REAL_SHAPES[name][0]), donate=(1,))
    assert text.count("__gpu$xla.gpu.triton") == 3


def shapes(layout, batch, per_token, experts=32):
    rows = [jax.ShapeDtypeStruct((count, layout.block_elems), layout.storage) for count in (64, experts)]
    routes = [jax.ShapeDtypeStruct((batch, per_token), dtype) for dtype in (jnp.int32, jnp.float32)]
    misses = jax.ShapeDtypeStruct((batch * per_token,), jnp.int32)
    x = jax.ShapeDtypeStruct((batch, layout.hidden), jnp.bfloat16)
    return x, rows[0], *routes, rows[1], misses, misses
