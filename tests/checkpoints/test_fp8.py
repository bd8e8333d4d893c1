"""FP8-block dequantisation against a loop over elements."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmoe_jax.checkpoints import fp8
from seqmoe_jax.checkpoints.fp8 import FP8, dequantize, scale_shape
from seqmoe_jax.errors import CheckpointError


def by_element(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    out = np.empty(weight.shape, np.float32)
    for *lead, i, j in np.ndindex(weight.shape):
        factor = np.float32(scale[(*lead, i // block[0], j // block[1])])
        out[(*lead, i, j)] = np.float32(weight[(*lead, i, j)]) * factor
    return out.astype(dtype)


@given(
    shape=st.tuples(st.integers(1, 14), st.integers(1, 14)),
    lead=st.lists(st.integers(1, 2), max_size=1),
    block=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    scale_dtype=st.sampled_from(["float32", "float16", "bfloat16", "float8_e8m0fnu"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_matches_the_definition(monkeypatch_chunk, shape, lead, block, scale_dtype, dtype, seed):
    rng = np.random.default_rng(seed)
    weight = rng.normal(0, 50, (*lead, *shape)).clip(-448, 448).astype(FP8)
    kind = np.dtype(getattr(ml_dtypes, scale_dtype, scale_dtype))
    scale = rng.uniform(0.001, 0.1, scale_shape(weight.shape, block)).astype(kind)
    want = np.dtype(getattr(ml_dtypes, dtype, dtype))
    out = dequantize(weight, scale, block=block, dtype=want)
    assert out.dtype == want
    np.testing.assert_array_equal(out, by_element(weight, scale, block, want))
    into = np.empty(weight.shape, want)
    assert dequantize(weight, scale, block=block, dtype=want, out=into) is into
    np.testing.assert_array_equal(into, out)


@pytest.fixture(scope="module")
def monkeypatch_chunk():
    """Chunks of a few rows, so that small arrays take more than one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "CHUNK_ELEMS", 16)
        yield


def test_ragged_last_blocks():
    assert scale_shape((576, 200), (128, 128)) == (5, 2)
    weight = np.ones((576, 200), FP8)
    scale = np.arange(10, dtype=np.float32).reshape(5, 2)
    out = dequantize(weight, scale, block=(128, 128), dtype=np.float32)
    assert (out[575, 199], out[511, 127], out[512, 128]) == (9, 6, 9)


@pytest.mark.parametrize("scale", [np.ones((2, 1), np.float32), np.ones((1, 2), np.float16), np.ones((1, 1), np.int32)])
def test_scales_that_do_not_fit(scale):
    with pytest.raises(CheckpointError, match=r"expected scales \[1, 1\] of float32"):
        dequantize(np.ones((4, 4), FP8), scale, block=(128, 128), dtype=np.float32)


def test_widening_is_a_cast_for_every_value():
    every = np.arange(256, dtype=np.uint8).view(FP8)
    for shape in ((2, 128), (1, 255)):
        weight = every[: shape[0] * shape[1]].reshape(shape)
        np.testing.assert_array_equal(fp8.widen(weight), weight.astype(np.float32))
