"""Claims about on-demand loading: the right bytes, in place, reading nothing but the missing experts."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import lower_for

from pallas_kernels.miss_load import miss_load

SLOTS, EXPERTS = 9, 6
DTYPES = [jnp.bfloat16, jnp.float32, jnp.float16, jnp.uint8]
MISSES = {
    "none": ([-1, -1, -1], [-1, -1, -1]),
    "some": ([4, 0, -1], [7, 2, -1]),
    "all": ([5, 1, 3], [8, 0, 4]),
    "without a slot": ([5, 1, -1], [8, -1, -1]),
}


def blocks(rows, length, dtype):
    return np.random.default_rng(rows).integers(0, 200, (rows, length)).astype(jnp.dtype(dtype))


def pinned(x):
    return jax.device_put(x, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))


def ints(x):
    return jnp.asarray(x, jnp.int32)


@pytest.mark.parametrize("implementation", ["xla", "gpu", "tpu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [256, 3 * 16384 + 128])
def test_missing_experts_and_nothing_else_are_copied(implementation, dtype, length):
    load = jax.jit(partial(miss_load, implementation=implementation, interpret=implementation != "xla"))
    for experts, dst in MISSES.values():
        slots, pool = blocks(SLOTS, length, dtype), blocks(EXPERTS, length, dtype)
        # Interpreted kernels know no memory spaces.
        actual = load(slots, pinned(pool) if implementation == "xla" else pool, ints(experts), ints(dst))
        for expert, slot in zip(experts, dst, strict=True):
            if slot >= 0:
                slots[slot] = pool[expert]
        np.testing.assert_array_equal(np.asarray(actual), slots)


@pytest.mark.parametrize(("pieces", "masked"), [(12, False), (24, True), (32, False), (40, True)])
def test_copies_are_masked_where_programs_cannot_share_the_pieces_evenly(pieces, masked):
    # 24 pieces are two for each of 16 programs: the last ones would write into the next slot. The interpreter drops
    # what is out of bounds, so the program itself is looked at.
    length = pieces * 8192
    arrays = [jax.ShapeDtypeStruct((rows, length), jnp.uint16) for rows in (4, 3)]
    ids = jax.ShapeDtypeStruct((2,), jnp.int32)
    program = str(jax.make_jaxpr(partial(miss_load, implementation="gpu"))(*arrays, ids, ids))
    assert bool(re.search(rf"lt \S+ {length}:i32", program)) == masked


def test_the_reference_writes_in_place_and_reads_single_rows():
    slots, pool = jnp.asarray(blocks(SLOTS, 512, jnp.float32)), pinned(blocks(EXPERTS, 512, jnp.float32))
    load = jax.jit(miss_load, donate_argnums=0)
    arguments = (ints([4, 0, -1]), ints([7, 2, -1]))
    text = load.lower(slots, pool, *arguments).compile().as_text()
    assert re.search(r"f32\[6,512\]\S*S\(5\)", text.splitlines()[0]), "the pool is not a host operand"
    assert "alias" in text.splitlines()[0]
    assert not re.findall(r"= f32\[[69],512\]\S* (?:copy|copy-start)\(.*", text)
    address = slots.unsafe_buffer_pointer()
    for _ in range(3):
        slots = load(slots, pool, *arguments)
        assert slots.unsafe_buffer_pointer() == address


def test_a_pool_of_another_dtype_is_refused():
    with pytest.raises(ValueError, match="expected float32 like the slots, got uint8"):
        miss_load(jnp.zeros((2, 4)), jnp.zeros((2, 4), jnp.uint8), ints([0]), ints([0]))


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("slots", "experts", "length", "misses"), [(2765, 128, 4718592, 8), (345, 32, 3000, 256)])
def test_kernels_lower_without_the_hardware(platform, dtype, slots, experts, length, misses):
    load = partial(miss_load, implementation="gpu" if platform == "cuda" else "tpu")
    ids = jax.ShapeDtypeStruct((misses,), jnp.int32)
    arrays = [jax.ShapeDtypeStruct((rows, length), dtype) for rows in (slots, experts)]
    assert "miss_load" in lower_for(platform, load, *arrays, ids, ids, donate=(0,))
