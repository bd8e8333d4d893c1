"""Claims about decode attention: it is the mixer's own attention, at every position, in every batch and capacity."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import lower_for

from pallas_kernels.decode_attention import DecodeAttentionConfig
from pallas_kernels.decode_attention.gpu import decode_attention
from seqmoe_jax.models.fused import heads_of
from seqmoe_jax.models.mixers.gqa import GQA, KV, GQAWeights
from seqmoe_jax.models.norms import RMSNorm
from seqmoe_jax.models.rope import Rope

NORM, ROPE = RMSNorm(eps=1e-6), Rope(theta=10000.0, dims=32)
SMALL = DecodeAttentionConfig(tile=16, splits=4)  # several tiles a program at few positions
KINDS = {
    "qwen": {"qk_norm": "head"},
    "llama": {"rope": Rope(theta=10000.0, dims=16)},
    "olmoe": {"qk_norm": "full", "clip": 0.7},
    "gpt-oss": {"sinks": True, "window": 24},
    "pairs": {"rope": Rope(theta=10000.0, dims=16, layout="pairs", part="last", magnitude=1.2)},
    "gemma": {"qk_norm": "head", "norm": RMSNorm(eps=1e-6, centre=0)},
}
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}


def mixer(kind, heads=6, kv_heads=2):
    how = {"norm": NORM, "rope": ROPE} | KINDS[kind]
    return GQA(heads=heads, kv_heads=kv_heads, head_dim=32, scale=32**-0.5, **how)


def arrays(spec, batch, capacity, dtype, seed=0):
    """What a projection gave, a full cache, and weights; the projection back is the identity."""
    rng = np.random.default_rng(seed)
    n, g, d = spec.heads, spec.kv_heads, spec.head_dim
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    widths = (n * d, g * d) if spec.qk_norm == "full" else (d, d)
    norms = [draw(width) for width in widths] if spec.qk_norm else [None, None]
    held = capacity if spec.window is None else min(spec.window, capacity)
    weights = GQAWeights(
        qkv=jnp.eye((n + 2 * g) * d, dtype=dtype),
        o=jnp.eye((n + 2 * g) * d, n * d, dtype=dtype), qkv_bias=None, o_bias=None,
        q_norm=norms[0], k_norm=norms[1], sinks=draw(n) if spec.sinks else None,
    )  # fmt: skip
    return draw(batch, (n + 2 * g) * d), KV(draw(batch, g, held, d), draw(batch, g, held, d)), weights


@partial(jax.jit, static_argnums=0)  # the interpreter is slow outside jit
def run(spec, qkv, kv, positions, weights):
    cos, sin = spec.rope.factors(positions, spec.head_dim, qkv.dtype)
    return decode_attention(
        qkv, *kv, positions, cos, sin, heads=heads_of(spec), q_norm=weights.q_norm, k_norm=weights.k_norm,
        sinks=weights.sinks, config=SMALL, interpret=True,
    )  # fmt: skip


@partial(jax.jit, static_argnums=0)
def by_the_mixer(spec, qkv, kv, positions, weights):
    # In float32: XLA's CPU backend does not have every product of bf16 arrays.
    qkv, kv, weights = jax.tree.map(lambda a: a.astype(jnp.float32), (qkv, kv, weights))
    valid = jnp.ones((len(positions), 1), bool)
    out, kv = spec.apply(qkv[:, None], kv, positions[:, None], valid, weights)
    return out[:, 0, : spec.heads * spec.head_dim], kv


@pytest.mark.parametrize(("kind", "dtype"), zip(KINDS, ["bfloat16", "float32"] * 3, strict=True))
def test_it_is_the_mixers_attention(dtype, kind):
    spec, positions = mixer(kind), jnp.array([0, 16, 99], jnp.int32)
    qkv, kv, weights = arrays(spec, len(positions), 100, dtype)
    expected, expected_kv = by_the_mixer(spec, qkv, kv, positions, weights)
    actual, *actual_kv = run(spec, qkv, kv, positions, weights)
    close = partial(np.testing.assert_allclose, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    close(np.float32(actual), np.float32(expected))
    for new, old in zip(actual_kv, expected_kv, strict=True):
        close(np.float32(new), np.float32(old))


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (40, 2)])
def test_any_number_of_queries_shares_a_key(heads, kv_heads):
    spec, positions = mixer("qwen", heads, kv_heads), jnp.array([37], jnp.int32)
    qkv, kv, weights = arrays(spec, 1, 64, "float32")
    expected, _ = by_the_mixer(spec, qkv, kv, positions, weights)
    np.testing.assert_allclose(run(spec, qkv, kv, positions, weights)[0], expected, rtol=2e-5, atol=2e-5)


def test_a_result_depends_on_neither_batch_nor_capacity():
    spec, positions = mixer("qwen"), jnp.array([70, 3, 12], jnp.int32)
    qkv, kv, weights = arrays(spec, 3, 128, "bfloat16")
    together = run(spec, qkv, kv, positions, weights)[0]
    for b in range(3):
        alone = KV(kv.k[b : b + 1, :, :80], kv.v[b : b + 1, :, :80])
        out = run(spec, qkv[b : b + 1], alone, positions[b : b + 1], weights)[0]
        np.testing.assert_array_equal(np.float32(out[0]), np.float32(together[b]))


def test_what_lies_behind_the_position_is_not_looked_at():
    spec, positions = mixer("llama"), jnp.array([20, 47], jnp.int32)
    qkv, kv, weights = arrays(spec, 2, 64, "float32")
    poisoned = KV(*(x.at[0, :, 20:].set(jnp.nan).at[1, :, 47:].set(jnp.nan) for x in kv))
    out = run(spec, qkv, poisoned, positions, weights)[0]
    np.testing.assert_array_equal(out, run(spec, qkv, kv, positions, weights)[0])


def test_heads_of_odd_size_are_refused():
    spec = GQA(heads=2, kv_heads=1, head_dim=80, rope=Rope(theta=1e4, dims=80), scale=1.0, norm=NORM)
    assert "heads of 80" in heads_of(spec).unfit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "capacity"), [(1, 512), (4, 5000)])
def test_it_lowers_without_the_hardware(dtype, kind, batch, capacity):
    spec = mixer(kind, 32, 4)
    qkv, kv, weights = jax.eval_shape(partial(arrays, spec, batch, capacity, dtype))
    tables = jax.ShapeDtypeStruct((batch, spec.head_dim), jnp.float32)
    positions = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def call(k, v, qkv, positions, cos, sin, weights):
        return decode_attention(
            qkv, k, v, positions, cos, sin, heads=heads_of(spec), q_norm=weights.q_norm, k_norm=weights.k_norm,
            sinks=weights.sinks,
        )  # fmt: skip

    text = lower_for("cuda", call, *kv, qkv, positions, tables, tables, weights, donate=(0, 1))
    assert "decode_attention" in text
    assert "decode_attention_combine" in text
