"""Small traces: random routing, and routing with something to learn in it."""

from __future__ import annotations

import numpy as np

from seqmoe_jax.traces.format import Trace


def random_trace(*, lengths, layers, experts, active, vocabulary, seed=0, split=None) -> Trace:
    """Routing that follows the token of the step in most layers, and is random otherwise."""
    random = np.random.default_rng(seed)
    steps = sum(lengths)
    tokens = random.integers(0, vocabulary, steps)
    fixed = np.random.default_rng(99)
    by_token = np.stack([[fixed.permutation(experts)[:active] for _ in range(layers)] for _ in range(vocabulary)])
    ids = by_token[tokens]
    noisy = random.random((steps, layers)) < 0.2
    anything = np.argsort(random.random((steps, layers, experts)), axis=-1)[..., :active]
    ids = np.where(noisy[..., None], anything, ids).astype(np.uint8)
    weights = -np.sort(-random.integers(1, 256, ids.shape), axis=-1).astype(np.uint8)
    return Trace(
        ids=ids,
        probs_u8=weights,
        tok=tokens.astype(np.int32),
        lens=np.array(lengths),
        seq_offsets=np.concatenate([[0], np.cumsum(lengths)]),
        num_experts=experts,
        layer_index=np.arange(layers),
        vocab_size=vocabulary,
        split=None if split is None else np.array(split),
    )
