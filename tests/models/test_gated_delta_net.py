"""The gated delta net: chunks and single steps are the same recurrence; padding leaves no trace in the state."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmoe_jax.models.mixers.gated_delta_net import (
    CHUNK,
    GatedDeltaNet,
    GatedDeltaNetWeights,
    chunk_gated_delta_rule,
    recurrent_gated_delta_rule,
)
from seqmoe_jax.models.norms import RMSNorm

SPEC = GatedDeltaNet(
    num_k_heads=2, num_v_heads=4, head_k_dim=16, head_v_dim=24, conv_kernel_size=4, norm=RMSNorm(eps=1e-6)
)
HIDDEN = 32
FLOAT32 = np.dtype(np.float32)


def random(seed, *shape, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, jnp.float32)


@pytest.fixture(scope="module")
def weights():
    n, v = SPEC.num_v_heads, SPEC.num_v_heads * SPEC.head_v_dim
    fan = HIDDEN**-0.5
    return GatedDeltaNetWeights(
        qkv=random(0, SPEC.conv_dim, HIDDEN, scale=fan),
        z=random(1, v, HIDDEN, scale=fan),
        ba=random(2, 2 * n, HIDDEN, scale=fan),
        conv=random(3, SPEC.conv_dim, SPEC.conv_kernel_size, scale=0.5),
        A_log=random(4, n, scale=0.5),
        dt_bias=random(5, n, scale=0.5),
        norm=1 + random(6, SPEC.head_v_dim, scale=0.2),
        out=random(7, HIDDEN, v, scale=v**-0.5),
    )


def heads(length):
    """q, k, v, log_decay, beta of `length` tokens of two sequences."""
    n, k, v = SPEC.num_v_heads, SPEC.head_k_dim, SPEC.head_v_dim
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    return (
        unit(random(11, 2, length, n, k)),
        unit(random(12, 2, length, n, k)),
        random(13, 2, length, n, v),
        -jnp.exp(random(14, 2, length, n)),
        jax.nn.sigmoid(random(15, 2, length, n)),
    )


def definition(q, k, v, log_decay, beta, memory):
    """The recurrence in float64, one token and one head at a time."""
    q, k, v, log_decay, beta, memory = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta, memory))
    memory, out = memory.copy(), np.zeros(v.shape)
    for b, t, n in np.ndindex(v.shape[:3]):
        m = memory[b, n] * np.exp(log_decay[b, t, n])
        m += np.outer(k[b, t, n], beta[b, t, n] * (v[b, t, n] - m.T @ k[b, t, n]))
        memory[b, n], out[b, t, n] = m, m.T @ q[b, t, n]
    return out, memory


@pytest.mark.parametrize("length", [16, CHUNK, 2 * CHUNK + 7])
def test_chunks_are_the_recurrence(length):
    inputs = heads(length)
    memory = random(16, 2, SPEC.num_v_heads, SPEC.head_k_dim, SPEC.head_v_dim)
    out, after = jax.jit(chunk_gated_delta_rule)(*inputs, memory)
    expected, expected_after = definition(*inputs, memory)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_allclose(after, expected_after, atol=2e-5)


def test_a_single_step_is_the_recurrence():
    inputs, memory = heads(1), random(16, 2, SPEC.num_v_heads, SPEC.head_k_dim, SPEC.head_v_dim)
    out, after = recurrent_gated_delta_rule(*inputs, memory)
    expected, expected_after = definition(*inputs, memory)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(after, expected_after, atol=1e-5)


def test_strong_decay_does_not_overflow():
    q, k, v, log_decay, beta = heads(CHUNK)
    memory = jnp.zeros((2, SPEC.num_v_heads, SPEC.head_k_dim, SPEC.head_v_dim))
    out, after = jax.jit(chunk_gated_delta_rule)(q, k, v, log_decay * 100, beta, memory)
    assert np.isfinite(out).all()
    assert np.isfinite(after).all()


@pytest.fixture(scope="module")
def mix(weights):
    return jax.jit(partial(SPEC.apply, weights=weights))


def run(mix, x, state, start, lengths):
    """Tokens of one chunk that begins at `start`; `lengths` of each row are valid."""
    where = start + jnp.arange(x.shape[1], dtype=jnp.int32)
    positions = jnp.broadcast_to(where, x.shape[:2])
    return mix(x, state, positions, positions < jnp.asarray(lengths)[:, None])


def test_prompts_of_different_lengths_in_chunks_equal_single_steps(mix):
    lengths, total = [37, 18], 40
    x = random(20, 2, 48, HIDDEN)
    state = SPEC.init_state(2, 0, FLOAT32)
    outs = []
    for start in range(0, 48, 16):  # the second row ends inside the second chunk and has nothing in the third
        out, state = run(mix, x[:, start : start + 16], state, start, lengths)
        outs.append(out)
    whole = jnp.concatenate(outs, axis=1)
    for row, length in enumerate(lengths):
        single = SPEC.init_state(1, 0, FLOAT32)
        for t in range(length):
            out, single = run(mix, x[row : row + 1, t : t + 1], single, t, [length])
            np.testing.assert_allclose(out[0, 0], whole[row, t], atol=3e-5)
        np.testing.assert_allclose(single.recurrent[0], state.recurrent[row], atol=3e-5)
        np.testing.assert_allclose(single.conv[0], state.conv[row], atol=1e-6)
    # From here both rows go on at positions of their own.
    positions = jnp.asarray(lengths, jnp.int32)[:, None]
    both, _ = mix(x[:, total : total + 1], state, positions, jnp.ones((2, 1), bool))
    alone, _ = mix(x[1:, total : total + 1], single, positions[1:], jnp.ones((1, 1), bool))
    np.testing.assert_allclose(both[1], alone[0], atol=3e-5)


def test_an_invalid_token_changes_nothing(mix):
    state = SPEC.init_state(2, 0, FLOAT32)
    _, state = run(mix, random(21, 2, 16, HIDDEN), state, 0, [16, 16])
    _, after = run(mix, random(22, 2, 1, HIDDEN), state, 16, [17, 16])
    assert not np.array_equal(after.recurrent[0], state.recurrent[0])
    assert np.array_equal(after.recurrent[1], state.recurrent[1])
    assert np.array_equal(after.conv[1], state.conv[1])


def test_a_step_updates_its_state_in_place(weights):
    step = jax.jit(partial(SPEC.apply, weights=weights), donate_argnums=1)
    state = SPEC.init_state(1, 0, FLOAT32)
    one = jnp.zeros((1, 1), jnp.int32)
    text = step.lower(jnp.zeros((1, 1, HIDDEN)), state, one, one == 0).compile().as_text()
    assert text.splitlines()[0].count("-alias") >= 2
    n, k, v = SPEC.num_v_heads, SPEC.head_k_dim, SPEC.head_v_dim
    assert f"f32[1,{n},{k},{v}]" in text
    for line in text.splitlines():
        assert not (f"= f32[1,{n},{k},{v}]" in line and " copy(" in line), line
        assert not (f"= f32[1,{SPEC.conv_kernel_size},{SPEC.conv_dim}]" in line and " copy(" in line), line
