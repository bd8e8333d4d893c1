"""What the numbers of a `config.json` may be. Published files are far inside; what is outside is damaged or a trap."""

from __future__ import annotations

from collections.abc import Mapping

from seqmoe_jax.fields import Range

MOST_KEYS = 1 << 18  # experts of all layers together; the largest published models have a tenth
_POSITIONS: Range = (1, (1 << 31) - 1)
_EPS: Range = (1e-20, 1.0)
_THETA: Range = (1.0, 1e12)
_FACTOR: Range = (1e-9, 1e9)
_EXPERTS: Range = (1, 1 << 13)

# A size that is not here is from 1 to `fields.SIZES`.
RANGES: Mapping[str, Range] = {
    "attention_factor": _FACTOR,
    "attention_multiplier": _FACTOR,
    "beta_fast": _FACTOR,
    "beta_slow": _FACTOR,
    "clip_qkv": _FACTOR,
    "compress_rope_theta": _THETA,
    "embedding_multiplier": _FACTOR,
    "factor": (1.0, 1e6),
    "hc_eps": _EPS,
    "hc_mult": (1, 64),
    "hc_sinkhorn_iters": (1, 100),
    "logits_scaling": _FACTOR,
    "max_position_embeddings": _POSITIONS,
    "mscale": (0.0, 1e3),
    "mscale_all_dim": (0.0, 1e3),
    "n_routed_experts": _EXPERTS,
    "num_experts": _EXPERTS,
    "num_hidden_layers": (1, 512),
    "num_local_experts": _EXPERTS,
    "original_max_position_embeddings": _POSITIONS,
    "partial_rotary_factor": (0.0, 1.0),
    "residual_multiplier": _FACTOR,
    "rms_norm_eps": _EPS,
    "rope_theta": _THETA,
    "routed_scaling_factor": _FACTOR,
    "sliding_window": _POSITIONS,
    "swiglu_limit": _FACTOR,
    "vocab_size": (1, 1 << 24),
    "weight_block_size": (1, 1 << 20),
}
