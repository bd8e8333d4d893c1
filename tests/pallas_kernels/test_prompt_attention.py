"""Claims about the attention of prompts: kernel and plain XLA are the definition, wherever chunk and keys begin."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import lower_for

from pallas_kernels.prompt_attention import PromptAttentionConfig, prompt_attention, unfit_sizes

SMALL = PromptAttentionConfig(queries=32, keys=16)  # several tiles at few positions
SCALE = 0.3
# Heads, key/value heads, size of a key and of a value, window, sinks.
KINDS = {
    "grouped": (4, 2, 32, 32, None, False),
    "sinks": (4, 4, 16, 16, None, True),
    "window": (4, 2, 16, 16, 24, False),
    "window and sinks": (2, 1, 16, 16, 7, True),
    "latent": (3, 1, 48, 32, None, False),
}


def arrays(kind, batch, length, capacity, dtype="float32"):
    heads, groups, size, value_size, _, sinks = KINDS[kind]
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    q, k = draw(batch, length, heads, size), draw(batch, groups, capacity, size)
    v = None if kind == "latent" else draw(batch, groups, capacity, value_size)
    return q, k, v, draw(heads) if sinks else None


@cache  # the interpreter is slow outside jit
def compiled(kind, implementation):
    *_, value_size, window, _ = KINDS[kind]
    call = partial(
        prompt_attention, scale=SCALE, window=window, value_size=value_size if kind == "latent" else None,
        implementation=implementation, interpret=True, config=SMALL,
    )  # fmt: skip
    return jax.jit(lambda q, k, v, sinks, at, first: call(q, k, v, at, first, sinks=sinks))


def definition(kind, q, k, v, sinks, at, first):
    """In float64, with a matrix of scores."""
    *_, value_size, window, _ = KINDS[kind]
    q, k = np.float64(q), np.repeat(np.float64(k), q.shape[2] // k.shape[1], axis=1)
    v = k[..., :value_size] if v is None else np.repeat(np.float64(v), q.shape[2] // v.shape[1], axis=1)
    query = np.asarray(at)[:, None, None] + np.arange(q.shape[1])[None, :, None]
    key = np.asarray(first)[:, None, None] + np.arange(k.shape[2])
    visible = (key >= 0) & (key <= query) & (key > query - (window or np.inf))
    scores = np.where(visible[:, None], np.einsum("btnd,bncd->bntc", q, k) * SCALE, -np.inf)
    sink = np.full((q.shape[2], 1, 1), -np.inf) if sinks is None else np.float64(sinks)[:, None, None]
    peak = np.maximum(scores.max(-1, keepdims=True), sink)
    powers = np.exp(scores - peak)
    return np.einsum("bntc,bncd->btnd", powers / (powers.sum(-1, keepdims=True) + np.exp(sink - peak)), v)


# Positions of the first queries, and how many keys before them are given.
@pytest.mark.parametrize(("where", "before"), [((0, 0), 0), ((60, 17), 24), ((5, 32), 40), ((16, 59), 31)])
@pytest.mark.parametrize("implementation", ["xla", "gpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_definition_wherever_chunk_and_keys_begin(kind, implementation, where, before):
    arguments = arrays(kind, 2, 48, 112)
    at = jnp.array(where, jnp.int32)
    # A window's keys may begin before the sequence does; others begin with it.
    first = jnp.zeros(2, jnp.int32) if KINDS[kind][4] is None else at - max(before, KINDS[kind][4])
    got = compiled(kind, implementation)(*arguments, at, first)
    np.testing.assert_allclose(got, definition(kind, *arguments, at, first), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["grouped", "window and sinks", "latent"])
def test_bf16_is_as_good_as_its_rounding(kind):
    arguments = arrays(kind, 1, 48, 112, "bfloat16")
    at, first = jnp.array([50], jnp.int32), jnp.array([0], jnp.int32)
    want = definition(kind, *arguments, at, first)
    for implementation in ("xla", "gpu"):
        got = compiled(kind, implementation)(*arguments, at, first)
        np.testing.assert_allclose(np.float32(got), want, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
@pytest.mark.parametrize("kind", ["grouped", "window", "latent"])
def test_a_result_depends_on_neither_batch_nor_what_lies_unwritten(kind, implementation):
    q, k, v, sinks = arrays(kind, 3, 48, 112)
    at, first = jnp.array([50, 0, 7], jnp.int32), jnp.zeros(3, jnp.int32)
    together = compiled(kind, implementation)(q, k, v, sinks, at, first)
    for b in range(3):
        only = slice(b, b + 1)
        k_b, v_b = (None if x is None else x[only].at[:, :, int(at[b]) + 48 :].set(jnp.nan) for x in (k, v))
        out = compiled(kind, implementation)(q[only], k_b, v_b, sinks, at[only], first[only])
        np.testing.assert_array_equal(out[0], together[b])


def test_unfit_inputs_are_refused():
    q, k, v, _ = arrays("grouped", 1, 16, 32)
    at = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="values of 24 "):
        prompt_attention(q[..., :24], k[..., :24], v[..., :24], at, at, scale=1.0, implementation="gpu")
    with pytest.raises(ValueError, match="expected keys and values of float32 like q, got bfloat16"):
        prompt_attention(q, k.astype(jnp.bfloat16), v, at, at, scale=1.0)
    with pytest.raises(ValueError, match="give values, or their size"):
        prompt_attention(q, k, None, at, at, scale=1.0)
    assert unfit_sizes(576, 512) is None
    assert "keys of 584" in str(unfit_sizes(584, 512))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_lowers_without_the_hardware(kind, dtype):
    *_, value_size, window, _ = KINDS[kind]
    q, k, v, sinks = jax.eval_shape(partial(arrays, kind, 1, 1024, 4096, dtype))
    at = jax.ShapeDtypeStruct((1,), jnp.int32)
    call = partial(prompt_attention, scale=1.0, window=window, implementation="gpu",
                   value_size=value_size if kind == "latent" else None)  # fmt: skip
    text = lower_for("cuda", lambda q, k, v, s, a: call(q, k, v, a, a, sinks=s), q, k, v, sinks, at)
    assert "prompt_attention" in text
