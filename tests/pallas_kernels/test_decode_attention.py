"""Claims about decode attention: the kernels' is the reference's, at every position, in every batch and capacity."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import lower_for

from pallas_kernels.decode_attention import DecodeAttentionConfig, Heads, decode_attention
from seqmoe_jax.models.norms import RMSNorm

D, NORM = 32, RMSNorm(eps=1e-6)
SMALL = DecodeAttentionConfig(tile=16, splits=4)  # several tiles a program at few positions
# What differs from heads without norms that rotate whole.
KINDS = {
    "qwen": {"norm": NORM},
    "llama": {"rotary_dim": 16},
    "olmoe": {"norm": NORM, "norm_over": "full", "clip": 0.7},
    "gpt-oss": {},  # with sinks, in a window's ring
    "pairs": {"rotary_dim": 16, "rotary_offset": 16, "rotary_layout": "pairs"},
    "gemma": {"norm": RMSNorm(eps=1e-6, zero_centered=True)},
}
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}


def heads_of(kind, num_heads=6, num_kv_heads=2, head_dim=D):
    how = {
        "norm": None, "norm_over": "head", "clip": None, "rotary_dim": head_dim, "rotary_offset": 0,
        "rotary_layout": "half",
    } | KINDS[kind]  # fmt: skip
    return Heads(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=head_dim**-0.5, **how)


def arrays(kind, heads, batch, capacity, dtype):
    """What a projection gave, a full cache, factors of the rotation, and weights."""
    rng = np.random.default_rng(0)
    n, g, d = heads.num_heads, heads.num_kv_heads, heads.head_dim
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    held = min(24, capacity) if kind == "gpt-oss" else capacity
    a = {"qkv": draw(batch, (n + 2 * g) * d), "k": draw(batch, g, held, d), "v": draw(batch, g, held, d)}
    turning = np.arange(d) - heads.rotary_offset
    turning = (turning >= 0) & (turning < heads.rotary_dim)
    for name, still in (("cos", 1.0), ("sin", 0.0)):
        a[name] = jnp.asarray(np.where(turning, rng.uniform(-1, 1, (batch, d)), still), dtype).astype(jnp.float32)
    if heads.norm is not None:
        full = heads.norm_over == "full"
        a |= {"q_norm": draw(n * d if full else d), "k_norm": draw(g * d if full else d)}
    return a | ({"sinks": draw(n)} if kind == "gpt-oss" else {})


@cache  # the interpreter is slow outside jit
def compiled(heads, implementation):
    call = partial(decode_attention, heads=heads, implementation=implementation, config=SMALL, interpret=True)
    return jax.jit(lambda a, positions: call(**a, positions=positions))


def kernel(heads, a, positions):
    return compiled(heads, "gpu")(a, positions)


def reference(heads, a, positions):
    # In float32: XLA's CPU backend does not have every product of bf16 arrays.
    return compiled(heads, "xla")(jax.tree.map(lambda x: x.astype(jnp.float32), a), positions)


@pytest.mark.parametrize(("kind", "dtype"), zip(KINDS, ["bfloat16", "float32"] * 3, strict=True))
def test_the_kernels_agree_with_the_reference(dtype, kind):
    heads, positions = heads_of(kind), jnp.array([0, 16, 99], jnp.int32)
    a = arrays(kind, heads, len(positions), 100, dtype)
    for got, want in zip(kernel(heads, a, positions), reference(heads, a, positions), strict=True):
        np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (40, 2)])
def test_any_number_of_queries_shares_a_key(num_heads, num_kv_heads):
    heads, positions = heads_of("qwen", num_heads, num_kv_heads), jnp.array([37], jnp.int32)
    a = arrays("qwen", heads, 1, 64, "float32")
    np.testing.assert_allclose(kernel(heads, a, positions)[0], reference(heads, a, positions)[0], rtol=2e-5, atol=2e-5)


def test_a_result_depends_on_neither_batch_nor_capacity():
    heads, positions = heads_of("qwen"), jnp.array([70, 3, 12], jnp.int32)
    a = arrays("qwen", heads, 3, 128, "bfloat16")
    together = kernel(heads, a, positions)[0]
    for b in range(3):
        alone = {name: x if name.endswith("norm") else x[b : b + 1] for name, x in a.items()}
        alone |= {name: alone[name][:, :, :80] for name in "kv"}
        out = kernel(heads, alone, positions[b : b + 1])[0]
        np.testing.assert_array_equal(np.float32(out[0]), np.float32(together[b]))


@pytest.mark.parametrize("run", [kernel, reference])
def test_what_lies_behind_the_position_is_not_looked_at(run):
    heads, positions = heads_of("llama"), jnp.array([20, 47], jnp.int32)
    a = arrays("llama", heads, 2, 64, "float32")
    high = {name: a[name].at[0, :, 20:].set(1e9).at[1, :, 47:].set(1e9) for name in "kv"}
    np.testing.assert_array_equal(run(heads, a | high, positions)[0], run(heads, a, positions)[0])


def test_the_kernels_do_not_read_what_lies_behind_the_position():
    heads, positions = heads_of("llama"), jnp.array([20, 47], jnp.int32)
    a = arrays("llama", heads, 2, 64, "float32")
    poisoned = {name: a[name].at[0, :, 20:].set(jnp.nan).at[1, :, 47:].set(jnp.nan) for name in "kv"}
    np.testing.assert_array_equal(kernel(heads, a | poisoned, positions)[0], kernel(heads, a, positions)[0])


def test_unfit_inputs_are_refused():
    odd = heads_of("qwen", head_dim=80)
    a = arrays("qwen", odd, 1, 16, "float32")
    with pytest.raises(ValueError, match="heads of 80"):
        decode_attention(**a, positions=jnp.zeros(1, jnp.int32), heads=odd, implementation="gpu")
    with pytest.raises(ValueError, match="expected a cache of float32 like qkv, got bfloat16"):
        decode_attention(**a | {"k": a["k"].astype(jnp.bfloat16)}, positions=jnp.zeros(1, jnp.int32), heads=odd)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "capacity"), [(1, 512), (4, 5000)])
def test_it_lowers_without_the_hardware(dtype, kind, batch, capacity):
    heads = heads_of(kind, 32, 4)
    a = jax.eval_shape(partial(arrays, kind, heads, batch, capacity, dtype))
    call = partial(decode_attention, heads=heads, implementation="gpu")
    positions = jax.ShapeDtypeStruct((batch,), jnp.int32)
    kv, rest = ([a.pop(name) for name in "kv"], a)
    text = lower_for("cuda", lambda k, v, p, a: call(k=k, v=v, positions=p, **a), *kv, positions, rest, donate=(0, 1))
    assert "decode_attention" in text
    assert "decode_attention_combine" in text
