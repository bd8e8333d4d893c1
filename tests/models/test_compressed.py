"""DeepSeek-V4's attention: chunks and single steps equal its definition, whatever windows and ratios they cross."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmoe_jax.models.mixers.compressed import CompressedAttention
from seqmoe_jax.models.mixers.compressor import Compressor, Indexer
from seqmoe_jax.models.norms import RMSNorm
from seqmoe_jax.models.rope import Rope

HIDDEN, EPS, FLOAT32 = 32, 1e-6, np.dtype(np.float32)
NORM = RMSNorm(eps=EPS)
ROPE = Rope(theta=1e4, rotary_dim=8, layout="pairs", rotated="last")
CAPACITY = 64


def compressor(ratio, dim, overlap):
    return Compressor(compress_ratio=ratio, head_dim=dim, overlap=overlap, rope=ROPE, norm=NORM)


KINDS = {
    "swa": dict(),
    "csa": dict(
        compressor=compressor(4, 16, True),
        indexer=Indexer(num_heads=8, top_k=3, compressor=compressor(4, 16, True), q_lora_rank=24),
    ),
    "csa, all entries": dict(
        compressor=compressor(4, 16, True),
        indexer=Indexer(num_heads=8, top_k=16, compressor=compressor(4, 16, True), q_lora_rank=24),
    ),
    "hca": dict(compressor=compressor(8, 16, False)),
}


def mixer(kind):
    return CompressedAttention(
        num_heads=4,
        head_dim=16,
        q_lora_rank=24,
        sliding_window=8,
        rope=ROPE,
        norm=NORM,
        o_groups=2,
        o_lora_rank=12,
        **KINDS[kind],
    )


def random_tensors(mixer):
    rng = np.random.default_rng(0)
    tensors = {}
    for name, tensor in mixer.tensors(HIDDEN).items():
        vector = len(tensor.shape) == 1
        spread = 0.3 if vector else 1.0 if name.endswith("ape") else tensor.shape[-1] ** -0.5
        tensors[name] = jnp.asarray(rng.standard_normal(tensor.shape) * spread + vector, jnp.float32)
    return tensors


def assemble(mixer, tensors):
    def take(*names):
        return jnp.concatenate([tensors[name] for name in names])

    return mixer.assemble(take)


def definition(mixer, tensors, x):
    """One sequence in float64, position by position."""
    w, x = {name: np.asarray(value, np.float64) for name, value in tensors.items()}, np.asarray(x, np.float64)

    def unit(v):
        return v / np.sqrt((v * v).mean(-1, keepdims=True) + EPS)

    def turn(v, at, sign=1):
        angle, v = sign * at * ROPE.inv_freq.astype(np.float64), v.copy()
        a, b = v[..., -8::2].copy(), v[..., -7::2].copy()
        v[..., -8::2], v[..., -7::2] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
        return v

    def softmax(v, axis):
        v = np.exp(v - v.max(axis, keepdims=True))
        return v / v.sum(axis, keepdims=True)

    def compress(spec, prefix):
        kv, gate = x @ w[prefix + "kv"].T, x @ w[prefix + "gate"].T
        m, d, entries = spec.compress_ratio, spec.head_dim, []
        for i in range(len(x) // m):
            slots = [(t, spec.series - 1) for t in range(m * i, m * i + m)]
            if spec.overlap and i:
                slots = [(t, 0) for t in range(m * i - m, m * i)] + slots
            c = np.stack([kv[t, s * d : s * d + d] for t, s in slots])
            g = np.stack([(gate[t] + w[prefix + "ape"][t % m])[s * d : s * d + d] for t, s in slots])
            entries.append(turn(unit((softmax(g, 0) * c).sum(0)) * w[prefix + "norm"], m * i))
        return np.array(entries).reshape(-1, d)

    latent = unit(x @ w["q_a"].T) * w["q_norm"]
    kv = unit(x @ w["kv"].T) * w["kv_norm"]
    kv = np.stack([turn(row, t) for t, row in enumerate(kv)])
    entries = compress(mixer.compressor, "compressor.") if mixer.compressor else np.zeros((0, 16))
    index = compress(mixer.indexer.compressor, "indexer.compressor.") if mixer.indexer else None
    out = []
    for t in range(len(x)):
        q = turn(unit((w["q_b"] @ latent[t]).reshape(mixer.num_heads, -1)), t)
        visible = np.arange((t + 1) // mixer.compressor.compress_ratio if mixer.compressor else 0)
        if index is not None and len(visible) > mixer.indexer.top_k:
            iq = turn((w["indexer.q_b"] @ latent[t]).reshape(mixer.indexer.num_heads, -1), t)
            scores = np.maximum(iq @ index[visible].T, 0).T @ (w["indexer.weights_proj"] @ x[t])
            visible = np.argsort(-scores, kind="stable")[: mixer.indexer.top_k]
        keys = np.concatenate([kv[max(0, t - mixer.sliding_window + 1) : t + 1], entries[visible]])
        scores = np.concatenate([q @ keys.T * mixer.head_dim**-0.5, w["sinks"][:, None]], axis=1)
        o = turn(softmax(scores, 1)[:, :-1] @ keys, t, -1).reshape(mixer.o_groups, -1)
        a = w["o_a"].reshape(mixer.o_groups, mixer.o_lora_rank, -1)
        out.append(w["o_b"] @ np.einsum("gri,gi->gr", a, o).ravel())
    return np.array(out)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_chunks_and_steps_equal_the_definition(kind):
    attention = mixer(kind)
    tensors = random_tensors(attention)
    apply = jax.jit(partial(attention.apply, weights=assemble(attention, tensors)))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, CAPACITY, HIDDEN)), jnp.float32)
    lengths, state = jnp.asarray([43, 22]), attention.init_state(2, CAPACITY, FLOAT32)
    outs = []
    for start in (0, 16, 32):
        positions = jnp.broadcast_to(start + jnp.arange(16, dtype=jnp.int32), (2, 16))
        out, state = apply(x[:, start : start + 16], state, positions, positions < lengths[:, None])
        outs.append(out)
    prompts, expected = jnp.concatenate(outs, axis=1), [definition(attention, tensors, row) for row in x]
    for row, length in enumerate(lengths.tolist()):
        np.testing.assert_allclose(prompts[row, :length], expected[row][:length], atol=1e-5)
    for step in range(CAPACITY - 43):  # rows go on at positions of their own, one of them to the end of the capacity
        positions = (lengths + step).astype(jnp.int32)[:, None]
        out, state = apply(jnp.take_along_axis(x, positions[..., None], 1), state, positions, jnp.ones((2, 1), bool))
        for row in range(2):
            np.testing.assert_allclose(out[row, 0], expected[row][positions[row, 0]], atol=1e-5)


def test_chunks_need_not_begin_with_a_window():
    attention = mixer("csa")
    tensors = random_tensors(attention)
    apply = jax.jit(partial(attention.apply, weights=assemble(attention, tensors)))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 36, HIDDEN)), jnp.float32)
    state, start, outs = attention.init_state(1, CAPACITY, FLOAT32), 0, []
    for size in (3, 16, 1, 16):
        positions = start + jnp.arange(size, dtype=jnp.int32)[None]
        out, state = apply(x[:, start : start + size], state, positions, jnp.ones((1, size), bool))
        outs.append(out)
        start += size
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1)[0], definition(attention, tensors, x[0]), atol=1e-5)


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_a_step_updates_its_state_in_place(kind):
    attention = mixer(kind)
    weights = assemble(attention, random_tensors(attention))
    step = jax.jit(partial(attention.apply, weights=weights), donate_argnums=1)
    state, one = attention.init_state(1, 4 * CAPACITY, FLOAT32), jnp.zeros((1, 1), jnp.int32)
    text = step.lower(jnp.zeros((1, 1, HIDDEN)), state, one, one == 0).compile().as_text()
    leaves = jax.tree.leaves(state)
    assert text.splitlines()[0].count("-alias") == len(leaves)
    for shape in {leaf.shape for leaf in leaves}:
        kind = f"= f32[{','.join(map(str, shape))}]"
        assert not [line for line in text.splitlines() if kind in line and " copy(" in line], kind
