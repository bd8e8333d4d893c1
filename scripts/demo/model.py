"""The demo model for training: Qwen3-MoE written for throughput with every expert on the device.

Parameters are one dictionary of float32 arrays, layers stacked on the first axis, matrices as `[in, out]`. All
experts are computed for all tokens and weighted with zero where the router did not choose them: at this size two
large matrix products beat any grouping.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

Params = dict[str, Array]


# Names of config.json for the fields of `ModelConfig`, and what else stands there.
HF_NAMES = {
    "vocab": "vocab_size",
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "rope_theta": "rope_theta",
    "eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
}
HF_CONSTANTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "eos_token_id": 0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "output_router_logits": False,
    "pad_token_id": 0,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.01,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
}


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model; `hf()` is its `config.json`."""

    vocab: int = 6144
    layers: int = 10
    hidden: int = 256
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    num_experts: int = 32
    top_k: int = 4
    width: int = 64
    rope_theta: float = 10_000.0
    eps: float = 1e-6
    max_positions: int = 2048

    def hf(self) -> dict[str, Any]:
        """The configuration in Hugging Face's words."""
        values = {theirs: getattr(self, ours) for ours, theirs in HF_NAMES.items()}
        return dict(sorted((HF_CONSTANTS | values | {"intermediate_size": self.width * self.top_k}).items()))

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        """The inverse of `hf()`."""
        return cls(**{ours: config[theirs] for ours, theirs in HF_NAMES.items()})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter."""
        n, h, d, e, f = self.layers, self.hidden, self.head_dim, self.num_experts, self.width
        return {
            "embed": (self.vocab, h),
            "final_norm": (h,),
            "attention_norm": (n, h),
            "q": (n, h, self.num_heads * d),
            "k": (n, h, self.num_kv_heads * d),
            "v": (n, h, self.num_kv_heads * d),
            "o": (n, self.num_heads * d, h),
            "q_norm": (n, d),
            "k_norm": (n, d),
            "moe_norm": (n, h),
            "router": (n, h, e),
            "gate": (n, e, h, f),
            "up": (n, e, h, f),
            "down": (n, e, f, h),
        }

    def parameters(self) -> int:
        """Number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes().values())


@dataclass(frozen=True)
class Compute:
    """How the model is computed; changes speed and rounding only."""

    dtype: str = "bfloat16"
    attention: Literal["xla", "cudnn"] = "xla"
    remat: bool = False


class Routing(NamedTuple):
    """What the router did in one layer (stacked over layers by `forward`)."""

    share: Float[Array, "... E"]  # fraction of the tokens that chose each expert; sums to K
    probability: Float[Array, "... E"]  # mean router probability
    z: Float[Array, "..."]  # mean squared log-sum-exp of the router's logits


def init_params(config: ModelConfig, key: Array) -> Params:
    """Fan-in scaled normal weights; the two projections into the residual stream are smaller with depth."""
    params: Params = {}
    residual = 1 / math.sqrt(2 * config.layers)
    for name, shape in config.shapes().items():
        key, sub = jax.random.split(key)
        if name.endswith("norm"):
            params[name] = jnp.ones(shape, jnp.float32)
            continue
        scale = 0.02 if name in ("embed", "router") else 1 / math.sqrt(shape[-2])
        scale *= residual if name in ("o", "down") else 1.0
        params[name] = scale * jax.random.normal(sub, shape, jnp.float32)
    return params


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Normalised in float32, rounded, then weighted."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return weight.astype(x.dtype) * wide.astype(x.dtype)


def rope_tables(config: ModelConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine `[T, D/2]` of the half-split rotary embedding."""
    frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    angles = np.arange(length)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def apply_rope(x: Float[Array, "B T N D"], cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x, 2, -1)
    cos, sin = cos[:, None].astype(x.dtype), sin[:, None].astype(x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def route(logits: Float[Array, "N E"], top_k: int) -> tuple[Array, Array, Routing]:
    """Softmax over all experts, the `top_k` largest (lowest index first among equals), renormalised.

    Returns weights `[N, E]` (zero where not chosen), the choice as a 0/1 mask, and the layer's statistics.
    """
    probabilities = jax.nn.softmax(logits, -1)
    left = lax.stop_gradient(probabilities)
    chosen = jnp.zeros_like(left)
    for _ in range(top_k):
        best = jax.nn.one_hot(jnp.argmax(left, -1), left.shape[-1], dtype=left.dtype)
        chosen, left = chosen + best, jnp.where(best > 0, -1.0, left)
    kept = probabilities * chosen
    weights = kept / kept.sum(-1, keepdims=True)
    statistics = Routing(chosen.mean(0), probabilities.mean(0), jnp.mean(jax.nn.logsumexp(logits, -1) ** 2))
    return weights, chosen, statistics


def attention(x: Float[Array, "B T H"], layer: Params, config: ModelConfig, compute: Compute) -> Array:
    batch, length, _ = x.shape
    q = (x @ layer["q"]).reshape(batch, length, config.num_heads, config.head_dim)
    k = (x @ layer["k"]).reshape(batch, length, config.num_kv_heads, config.head_dim)
    v = (x @ layer["v"]).reshape(batch, length, config.num_kv_heads, config.head_dim)
    cos, sin = rope_tables(config, length)
    q = apply_rope(rms_norm(q, layer["q_norm"], config.eps), jnp.asarray(cos), jnp.asarray(sin))
    k = apply_rope(rms_norm(k, layer["k_norm"], config.eps), jnp.asarray(cos), jnp.asarray(sin))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=compute.attention)
    return mixed.reshape(batch, length, -1) @ layer["o"]


def mixture(x: Float[Array, "N H"], layer: Params, top_k: int) -> tuple[Array, Routing, Array]:
    """All experts on all tokens, weighted by the router. Also returns the 0/1 choice `[N, E]`."""
    logits = jnp.matmul(x, layer["router"], preferred_element_type=jnp.float32)
    weights, chosen, statistics = route(logits, top_k)
    inner = jax.nn.silu(jnp.einsum("nh,ehf->nef", x, layer["gate"])) * jnp.einsum("nh,ehf->nef", x, layer["up"])
    inner = inner * weights.astype(x.dtype)[:, :, None]
    return jnp.einsum("nef,efh->nh", inner, layer["down"]), statistics, chosen


PER_LAYER = (
    "attention_norm", "q", "k", "v", "o", "q_norm", "k_norm", "moe_norm", "router", "gate", "up", "down",
)  # fmt: skip


def forward(
    params: Params, tokens: Int[Array, "B T"], config: ModelConfig, compute: Compute
) -> tuple[Float[Array, "B T V"], Routing]:
    """Logits in float32 and the routing statistics of every layer."""
    dtype = jnp.dtype(compute.dtype)
    cast = {name: value.astype(dtype) for name, value in params.items()}

    def block(x: Array, layer: Params) -> tuple[Array, Routing]:
        x = x + attention(rms_norm(x, layer["attention_norm"], config.eps), layer, config, compute)
        flat = rms_norm(x, layer["moe_norm"], config.eps).reshape(-1, config.hidden)
        out, statistics, _ = mixture(flat, layer, config.top_k)
        return x + out.reshape(x.shape), statistics

    body = jax.checkpoint(block) if compute.remat else block
    # Gathered in float32: the gradient of frequent tokens is a sum of many terms.
    embedded = params["embed"][tokens].astype(dtype)
    x, routing = lax.scan(body, embedded, {name: cast[name] for name in PER_LAYER})
    x = rms_norm(x, cast["final_norm"], config.eps)
    logits = jnp.einsum("bth,vh->btv", x, cast["embed"], preferred_element_type=jnp.float32)
    return logits, routing


class LossWeights(NamedTuple):
    """Weights of the auxiliary losses."""

    balance: float = 0.01
    router_z: float = 1e-3
    logit_z: float = 1e-4


@functools.partial(jax.named_call, name="loss")
def loss_fn(
    params: Params,
    tokens: Int[Array, "B T1"],
    config: ModelConfig,
    compute: Compute,
    weights: LossWeights = LossWeights(),  # noqa: B008 - immutable
) -> tuple[Array, dict[str, Array]]:
    """Training loss of windows of T+1 tokens, and its parts."""
    logits, routing = forward(params, tokens[:, :-1], config, compute)
    log_z = jax.nn.logsumexp(logits, -1)
    # A masked sum, not a gather: its gradient is elementwise instead of a scatter into all logits.
    is_target = jnp.arange(config.vocab) == tokens[:, 1:, None]
    picked = jnp.sum(jnp.where(is_target, logits, 0.0), -1)
    cross_entropy = jnp.mean(log_z - picked)
    # E * sum(share * probability) / K is 1 where every expert gets the same; over the whole batch, per layer.
    balance = jnp.mean(jnp.sum(lax.stop_gradient(routing.share) * routing.probability, -1))
    balance = balance * config.num_experts / config.top_k
    router_z, logit_z = jnp.mean(routing.z), jnp.mean(log_z**2)
    total = cross_entropy + weights.balance * balance + weights.router_z * router_z + weights.logit_z * logit_z
    parts = {
        "loss": cross_entropy,
        "balance": balance,
        "router_z": router_z,
        "least_share": jnp.min(routing.share),
    }
    return total, parts
