"""Latent attention: the absorbed form over the latent cache is attention over expanded keys and values."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmoe_jax.models.mixers.mla import MLA
from seqmoe_jax.models.norms import RMSNorm
from seqmoe_jax.models.rope import Rope, Yarn

HIDDEN, FLOAT32 = 32, np.dtype(np.float32)
YARN = Yarn(factor=4.0, original_max_position_embeddings=64)
CAPACITY = 64


def mixer(q_lora_rank):
    return MLA(
        num_heads=4,
        qk_nope_head_dim=16,
        rope=Rope(theta=1e4, rotary_dim=8, layout="pairs", yarn=YARN),
        v_head_dim=24,
        kv_lora_rank=32,
        q_lora_rank=q_lora_rank,
        scale=0.3,
        norm=RMSNorm(eps=1e-6),
    )


def random_tensors(mixer):
    rng = np.random.default_rng(0)
    tensors = {}
    for name, tensor in mixer.tensors(HIDDEN).items():
        spread = 0.2 if len(tensor.shape) == 1 else tensor.shape[-1] ** -0.5
        value = rng.standard_normal(tensor.shape) * spread + (len(tensor.shape) == 1)
        tensors[name] = jnp.asarray(value, jnp.float32)
    return tensors


def definition(mixer, tensors, x):
    """One sequence, keys and values of every head expanded, float64."""
    w = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    x = np.asarray(x, np.float64)
    rms = lambda v, g: g * v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-6)  # noqa: E731
    n, p = mixer.num_heads, mixer.qk_nope_head_dim

    def turn(v):
        angle = np.arange(len(v))[:, None, None] * mixer.rope.inv_freq.astype(np.float64)
        a, b = v[..., ::2], v[..., 1::2]
        pair = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
        return np.stack(pair, -1).reshape(v.shape)

    q = x @ w["q"].T if "q" in w else rms(x @ w["q_a"].T, w["q_a_norm"]) @ w["q_b"].T
    q = q.reshape(len(x), n, -1)
    kv = x @ w["kv_a"].T
    expanded = (rms(kv[:, : mixer.kv_lora_rank], w["kv_a_norm"]) @ w["kv_b"].T).reshape(len(x), n, -1)
    k_rope = turn(kv[:, None, mixer.kv_lora_rank :])
    scores = np.einsum("snp,tnp->nst", q[..., :p], expanded[..., :p])
    scores += np.einsum("snr,tmr->nst", turn(q[..., p:]), k_rope)
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores * mixer.scale, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("nst,tnv->snv", weights, expanded[..., p:]).reshape(len(x), -1) @ w["o"].T


@pytest.mark.parametrize("q_lora_rank", [None, 24])
def test_prompt_chunks_and_steps_equal_expanded_attention(q_lora_rank):
    mla = mixer(q_lora_rank)
    tensors = random_tensors(mla)
    weights = mla.assemble(lambda *names: tensors[names[0]])
    apply = jax.jit(partial(mla.apply, weights=weights))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 40, HIDDEN)), jnp.float32)
    lengths, state = jnp.asarray([33, 20]), mla.init_state(2, CAPACITY, FLOAT32)
    outs = []
    for start in (0, 16, 32):
        part = jnp.pad(x[:, start : start + 16], [(0, 0), (0, max(0, start + 16 - 40)), (0, 0)])
        positions = jnp.broadcast_to(start + jnp.arange(16, dtype=jnp.int32), (2, 16))
        out, state = apply(part, state, positions, positions < lengths[:, None])
        outs.append(out)
    prompts, expected = jnp.concatenate(outs, axis=1), [definition(mla, tensors, row) for row in x]
    for row, length in enumerate(lengths.tolist()):
        np.testing.assert_allclose(prompts[row, :length], expected[row][:length], atol=1e-5)
    for step in range(7):  # rows go on at positions of their own
        positions = (lengths + step).astype(jnp.int32)[:, None]
        out, state = apply(jnp.take_along_axis(x, positions[..., None], 1), state, positions, jnp.ones((2, 1), bool))
        for row in range(2):
            np.testing.assert_allclose(out[row, 0], expected[row][positions[row, 0]], atol=1e-5)


def test_the_cache_holds_latents_and_is_written_in_place():
    mla = mixer(None)
    tensors = random_tensors(mla)
    step = jax.jit(partial(mla.apply, weights=mla.assemble(lambda *names: tensors[names[0]])), donate_argnums=1)
    state, one = mla.init_state(1, CAPACITY, FLOAT32), jnp.zeros((1, 1), jnp.int32)
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [(1, CAPACITY, 32 + 8)]
    text = step.lower(jnp.zeros((1, 1, HIDDEN)), state, one, one == 0).compile().as_text()
    assert "-alias" in text.splitlines()[0]
    assert f"f32[1,{CAPACITY},40]" in text
    assert not [line for line in text.splitlines() if f"= f32[1,{CAPACITY},40]" in line and " copy(" in line]


def test_the_released_models_scale_by_the_squared_mscale():
    scale = lambda factor, mscale: (0.1 * mscale * math.log(factor) + 1) ** 2  # noqa: E731
    assert scale(40, 1.0) == pytest.approx(1.87385, abs=1e-5)  # DeepSeek-V3
    assert scale(40, 0.707) == pytest.approx(1.58963, abs=1e-5)  # DeepSeek-V2-Lite
