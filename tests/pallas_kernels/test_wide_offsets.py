"""Every kernel finds every byte of slots and pools between 2 and 4 GiB, where JAX's lowering by itself does not."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton
from lowering import lower_for

from pallas_kernels import wide_offsets
from pallas_kernels.fused_moe import fused_moe, moe_on_demand
from pallas_kernels.grouped_moe import grouped_moe
from pallas_kernels.layout import FP4, swiglu_layout
from pallas_kernels.miss_load import miss_load

LAYOUT = swiglu_layout(hidden=4096, width=2048, dtype=FP4)  # that of DeepSeek-V4-Flash, whose pools are of 3.4 GB
GPU = {"implementation": "gpu"}


def of(gibibytes):
    """An array of as many experts."""
    return jax.ShapeDtypeStruct((int(gibibytes * 2**30) // LAYOUT.block_bytes, LAYOUT.block_elems), LAYOUT.storage)


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def programs(kernel, slots, pool):
    """The Triton programs of a kernel for slots and a pool of some GiB."""
    routes, missing = (ints(1, 6), floats(1, 6, dtype=jnp.float32)), (ints(6), ints(6))
    call = {
        "miss_load": lambda: (partial(miss_load, **GPU), of(slots), of(pool), *missing),
        "fused_moe": lambda: (partial(fused_moe, layout=LAYOUT, **GPU), floats(1, 4096), of(slots), *routes),
        "moe_on_demand": lambda: (
            partial(moe_on_demand, layout=LAYOUT, **GPU), floats(1, 4096), of(slots), *routes,
            of(pool), *missing,
        ),
        "grouped_moe": lambda: (
            partial(grouped_moe, layout=LAYOUT, **GPU), floats(4, 16, 4096, dtype=jnp.float32), floats(32, 4096),
            of(slots), ints(4), ints(4, 16),
        ),
    }[kernel]()  # fmt: skip
    return [readable(escaped) for escaped in re.findall(r'\bir = "([^"]*)"', lower_for("cuda", *call))]


def readable(escaped):
    """A program as text, without where in Python it was made."""
    code = re.sub(rb"\\([0-9A-F]{2}|.)", lambda m: m[1] if len(m[1]) == 1 else bytes([int(m[1], 16)]), escaped.encode())
    with ir.Context() as context:
        triton.register_dialect(context)
        return str(ir.Module.parse(code))


def offsets(texts):
    """The types of all offsets from pointers to bytes."""
    return set(re.findall(r"tt\.addptr .*ptr<i8>.*?, (?:tensor<[\dx]*)?(i\d+)", "\n".join(texts)))


def operations(texts):
    """What the programs do, in order."""
    return [operation for text in texts for operation in re.findall(r"= ([\w.]+)|(tt.store)", text)]


@pytest.mark.parametrize("kernel", ["miss_load", "fused_moe", "moe_on_demand", "grouped_moe"])
def test_slots_and_pools_are_addressed_alike_whatever_their_size(kernel):
    """Were they not, sums would have another order, and tokens other bits, at another residency."""
    small, large = programs(kernel, 1, 1), programs(kernel, 2.1, 3.9)
    assert offsets(small) == offsets(large) == {"i64"}
    assert operations(small) == operations(large)


def test_what_is_known_of_indices_is_known_of_offsets():
    """So many neighbours a thread reads at once: a kernel of FP8 experts took a fifth longer without."""
    hinted = r"arith.addi [^\n]*tt.contiguity[^\n]*xi64>"
    assert all(re.search(hinted, text) for text in programs("fused_moe", 5, 5))


def test_without_a_way_into_the_lowering_arrays_that_it_misreads_are_refused(monkeypatch):
    monkeypatch.setattr(wide_offsets, "_teach_the_lowering", lambda: False)
    programs("fused_moe", 1.9, 1)
    programs("fused_moe", 5, 1)
    with pytest.raises(ValueError, match=r"slots: uint8\[273, 13369344\] is between 2 and 4 GiB"):
        programs("fused_moe", 3.4, 1)
