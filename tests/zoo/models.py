"""Small language models with experts in Flax NNX, as zoos write them: their names, shapes and arithmetic."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

HIGHEST = jax.lax.Precision.HIGHEST


def norm(x, weight, eps):
    x32 = x.astype(jnp.float32)
    return (weight * (x32 * jax.lax.rsqrt((x32**2).mean(-1, keepdims=True) + eps))).astype(x.dtype)


def rotate(x, positions, theta):
    half = x.shape[-1] // 2
    angle = positions[..., None, None] / theta ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attend(q, k, v, mask, sinks=None):
    """`q` [B, T, N, H], `k` and `v` [B, S, G, H], `mask` [B, T, S]."""
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(mask[:, None], scores, -1e30)
    if sinks is not None:
        rows = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, rows], -1)
    weights = jax.nn.softmax(scores, -1)[..., : k.shape[1]].astype(q.dtype)
    return jnp.einsum("BNTS,BSNH->BTNH", weights, v)


def causal(tokens, window=None):
    at = jnp.arange(tokens.shape[1])
    seen = at[:, None] >= at
    if window is not None:
        seen &= at[:, None] - at < window
    return jnp.broadcast_to(seen, (tokens.shape[0], *seen.shape))


def normal(rngs, *shape, dtype, scale=None):
    scale = shape[-2] ** -0.5 if scale is None and len(shape) > 1 else scale or 1.0
    return nnx.Param((jax.random.normal(rngs.params(), shape) * scale).astype(dtype))


# Tunix: einsums over heads, and a cache in the call.


@dataclass
class TunixConfig:
    num_layers: int = 3
    vocab_size: int = 96
    embed_dim: int = 32
    hidden_dim: int = 16
    num_heads: int = 4
    head_dim: int = 16
    num_kv_heads: int = 2
    rope_theta: int = 1_000_000
    norm_eps: float = 1e-6
    use_tied_embedding: bool = False
    num_experts: int = 8
    num_experts_per_tok: int = 2
    dtype: object = jnp.float32


class Weight(nnx.Module):
    def __init__(self, *shape, rngs, dtype, ones=False):
        fan_in = shape[0] if len(shape) < 3 or shape[0] > 4 else shape[0] * shape[1]
        self.w = nnx.Param(jnp.ones(shape, dtype)) if ones else normal(rngs, *shape, dtype=dtype, scale=fan_in**-0.5)


class TunixAttention(nnx.Module):
    def __init__(self, config, rngs):
        c = self.config = config
        make = {"rngs": rngs, "dtype": c.dtype}
        self.q_proj = Weight(c.embed_dim, c.num_heads, c.head_dim, **make)
        self.k_proj = Weight(c.embed_dim, c.num_kv_heads, c.head_dim, **make)
        self.v_proj = Weight(c.embed_dim, c.num_kv_heads, c.head_dim, **make)
        self.o_proj = Weight(c.num_heads, c.head_dim, c.embed_dim, **make)
        self.q_norm = Weight(c.head_dim, ones=True, **make)
        self.k_norm = Weight(c.head_dim, ones=True, **make)

    def __call__(self, x, positions, cache, mask):
        c = self.config
        q, k, v = (jnp.einsum("BTD,DNH->BTNH", x, each.w[...]) for each in (self.q_proj, self.k_proj, self.v_proj))
        q = rotate(norm(q, self.q_norm.w[...], c.norm_eps), positions, c.rope_theta)
        k = rotate(norm(k, self.k_norm.w[...], c.norm_eps), positions, c.rope_theta)
        if cache is not None:
            at = (0, cache["end_index"][0], 0, 0)
            k = jax.lax.dynamic_update_slice(cache["k"], k, at)
            v = jax.lax.dynamic_update_slice(cache["v"], v, at)
            cache = {"k": k, "v": v, "end_index": cache["end_index"] + x.shape[1]}
        return cache, jnp.einsum("BTNH,NHD->BTD", attend(q, k, v, mask), self.o_proj.w[...])


class TunixMoE(nnx.Module):
    def __init__(self, config, rngs):
        c = config
        self.num_experts, self.experts_per_tok, self.dtype = c.num_experts, c.num_experts_per_tok, c.dtype
        self.router = nnx.Linear(
            c.embed_dim, c.num_experts, use_bias=False, rngs=rngs, dtype=c.dtype, param_dtype=c.dtype
        )
        self.gate_proj = normal(rngs, c.num_experts, c.embed_dim, c.hidden_dim, dtype=c.dtype)
        self.up_proj = normal(rngs, c.num_experts, c.embed_dim, c.hidden_dim, dtype=c.dtype)
        self.down_proj = normal(rngs, c.num_experts, c.hidden_dim, c.embed_dim, dtype=c.dtype)

    def __call__(self, x):
        scores = jax.nn.softmax(self.router(x).astype(jnp.float32), -1)
        weights, ids = jax.lax.top_k(scores, self.experts_per_tok)
        weights = (weights / weights.sum(-1, keepdims=True)).astype(self.dtype)
        gate = jnp.einsum("BTD,EDF->BTEF", x, self.gate_proj[...])
        up = jnp.einsum("BTD,EDF->BTEF", x, self.up_proj[...])
        out = jnp.einsum("BTEF,EFD->BTED", nnx.silu(gate) * up, self.down_proj[...])
        return jnp.einsum("BTED,BTE->BTD", out, spread(ids, weights, self.num_experts))


def spread(ids, weights, experts):
    """Weights of all experts, 0 where a token does not go."""
    return (jax.nn.one_hot(ids, experts, dtype=weights.dtype) * weights[..., None]).sum(-2)


class TunixLayer(nnx.Module):
    def __init__(self, config, rngs):
        self.eps = config.norm_eps
        self.input_layernorm = Weight(config.embed_dim, rngs=rngs, dtype=config.dtype, ones=True)
        self.attn = TunixAttention(config, rngs)
        self.post_attention_layernorm = Weight(config.embed_dim, rngs=rngs, dtype=config.dtype, ones=True)
        self.mlp = TunixMoE(config, rngs)

    def __call__(self, x, positions, cache, mask):
        cache, mixed = self.attn(norm(x, self.input_layernorm.w[...], self.eps), positions, cache, mask)
        x = x + mixed
        return cache, x + self.mlp(norm(x, self.post_attention_layernorm.w[...], self.eps))


class TunixEmbedder(nnx.Module):
    def __init__(self, config, rngs):
        self.input_embedding = normal(rngs, config.vocab_size, config.embed_dim, dtype=config.dtype, scale=1.0)


class Qwen3(nnx.Module):
    """Tunix's, for Qwen3-MoE."""

    def __init__(self, config, *, rngs):
        self.config = config
        self.embedder = TunixEmbedder(config, rngs)
        self.layers = nnx.List([TunixLayer(config, rngs) for _ in range(config.num_layers)])
        self.final_norm = Weight(config.embed_dim, rngs=rngs, dtype=config.dtype, ones=True)
        if not config.use_tied_embedding:
            self.lm_head = Weight(config.embed_dim, config.vocab_size, rngs=rngs, dtype=config.dtype)

    def init_cache(self, batch, size, dtype):
        c = self.config
        shape = (batch, size, c.num_kv_heads, c.head_dim)
        return {
            f"layer_{i}": {
                "k": jnp.zeros(shape, dtype),
                "v": jnp.zeros(shape, dtype),
                "end_index": jnp.zeros(batch, jnp.int32),
            }
            for i in range(c.num_layers)
        }

    def __call__(self, tokens, positions, cache, mask):
        x, new = self.embedder.input_embedding[...][tokens], {}
        for i, layer in enumerate(self.layers):
            part, x = layer(x, positions, None if cache is None else cache[f"layer_{i}"], mask)
            new[f"layer_{i}"] = part
        x = norm(x, self.final_norm.w[...], self.config.norm_eps)
        head = self.embedder.input_embedding[...].T if self.config.use_tied_embedding else self.lm_head.w[...]
        return (x @ head).astype(jnp.float32), None if cache is None else new

    def logits(self, tokens):
        at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return self(tokens, at, None, causal(tokens))[0]


# EasyDeL and bonsai: names as in the files of Hugging Face, kernels of Flax in them.


@dataclass
class FilesConfig:
    vocab_size: int = 96
    hidden_size: int = 32
    intermediate_size: int = 16
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    max_position_embeddings: int = 512
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    sliding_window: int | None = None


class Kernel(nnx.Module):
    """An array by itself, as stacked experts and norms are."""

    def __init__(self, rngs, *shape, bias=None):
        self.kernel = normal(rngs, *shape, dtype=jnp.float32) if len(shape) > 1 else nnx.Param(jnp.ones(shape))
        if bias is not None:
            self.bias = normal(rngs, *bias, dtype=jnp.float32, scale=0.1)


class FilesAttention(nnx.Module):
    def __init__(self, c, rngs, window, sinks):
        self.config, self.window = c, window
        widths = {"q": c.num_attention_heads, "k": c.num_key_value_heads, "v": c.num_key_value_heads}
        for name, heads in widths.items():
            linear = nnx.Linear(c.hidden_size, heads * c.head_dim, use_bias=c.attention_bias, rngs=rngs,
                                bias_init=nnx.initializers.normal(0.1))  # fmt: skip
            setattr(self, f"{name}_proj", linear)
        self.o_proj = nnx.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, use_bias=c.attention_bias,
                                 rngs=rngs, bias_init=nnx.initializers.normal(0.1))  # fmt: skip
        self.sinks = normal(rngs, c.num_attention_heads, dtype=jnp.float32) if sinks else None

    def __call__(self, x, tokens, positions):
        c = self.config
        q, k, v = (getattr(self, f"{n}_proj")(x).reshape(*x.shape[:2], -1, c.head_dim) for n in "qkv")
        q, k = rotate(q, positions, c.rope_theta), rotate(k, positions, c.rope_theta)
        out = attend(q, k, v, causal(tokens, self.window), None if self.sinks is None else self.sinks[...])
        return self.o_proj(out.reshape(*x.shape[:2], -1))


class MixtralExperts(nnx.Module):
    def __init__(self, c, rngs):
        self.w1 = Kernel(rngs, c.num_local_experts, c.hidden_size, c.intermediate_size)
        self.w2 = Kernel(rngs, c.num_local_experts, c.intermediate_size, c.hidden_size)
        self.w3 = Kernel(rngs, c.num_local_experts, c.hidden_size, c.intermediate_size)


class MixtralMoE(nnx.Module):
    def __init__(self, c, rngs):
        self.config = c
        self.gate = nnx.Linear(c.hidden_size, c.num_local_experts, use_bias=False, rngs=rngs)
        self.experts = MixtralExperts(c, rngs)

    def __call__(self, x):
        weights, ids = jax.lax.top_k(jax.nn.softmax(self.gate(x), -1), self.config.num_experts_per_tok)
        weights = spread(ids, weights / weights.sum(-1, keepdims=True), self.config.num_local_experts)
        e = self.experts
        gate = jnp.einsum("BTD,EDF->BTEF", x, e.w1.kernel[...])
        up = jnp.einsum("BTD,EDF->BTEF", x, e.w3.kernel[...])
        return jnp.einsum("BTEF,EFD,BTE->BTD", nnx.silu(gate) * up, e.w2.kernel[...], weights)


class GptOssExperts(nnx.Module):
    def __init__(self, c, rngs):
        e, d, f = c.num_local_experts, c.hidden_size, c.intermediate_size
        self.gate_up_proj = normal(rngs, e, d, 2 * f, dtype=jnp.float32)
        self.gate_up_proj_bias = normal(rngs, e, 2 * f, dtype=jnp.float32, scale=0.1)
        self.down_proj = normal(rngs, e, f, d, dtype=jnp.float32)
        self.down_proj_bias = normal(rngs, e, d, dtype=jnp.float32, scale=0.1)


class GptOssRouter(nnx.Module):
    def __init__(self, c, rngs):
        self.linear = nnx.Linear(c.hidden_size, c.num_local_experts, rngs=rngs, bias_init=nnx.initializers.normal(0.1))


class GptOssMoE(nnx.Module):
    def __init__(self, c, rngs):
        self.config = c
        self.router = GptOssRouter(c, rngs)
        self.experts = GptOssExperts(c, rngs)

    def weights(self, x):
        best, ids = jax.lax.top_k(self.router.linear(x), self.config.num_experts_per_tok)
        return spread(ids, jax.nn.softmax(best, -1), self.config.num_local_experts)

    def __call__(self, x):
        weights = self.weights(x)
        e = self.experts
        both = jnp.einsum("BTD,EDF->BTEF", x, e.gate_up_proj[...]) + e.gate_up_proj_bias[...]
        gate, up = jnp.minimum(both[..., ::2], 7.0), jnp.clip(both[..., 1::2], -7.0, 7.0)
        hidden = (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
        out = jnp.einsum("BTEF,EFD->BTED", hidden, e.down_proj[...]) + e.down_proj_bias[...]
        return jnp.einsum("BTED,BTE->BTD", out, weights)


class FilesLayer(nnx.Module):
    def __init__(self, c, rngs, index, moe):
        oss = moe == "mlp"
        self.eps, self.moe = c.rms_norm_eps, moe
        self.input_layernorm = Kernel(rngs, c.hidden_size)
        self.self_attn = FilesAttention(c, rngs, c.sliding_window if oss and index % 2 == 0 else None, oss)
        self.post_attention_layernorm = Kernel(rngs, c.hidden_size)
        setattr(self, moe, (GptOssMoE if oss else MixtralMoE)(c, rngs))

    def __call__(self, x, tokens, positions):
        x = x + self.self_attn(norm(x, self.input_layernorm.kernel[...], self.eps), tokens, positions)
        return x + getattr(self, self.moe)(norm(x, self.post_attention_layernorm.kernel[...], self.eps))


class FilesModel(nnx.Module):
    def __init__(self, c, rngs, moe):
        self.embed_tokens = nnx.Embed(c.vocab_size, c.hidden_size, rngs=rngs)
        self.layers = nnx.List([FilesLayer(c, rngs, i, moe) for i in range(c.num_hidden_layers)])
        self.norm = Kernel(rngs, c.hidden_size)


class _ForCausalLM(nnx.Module):
    moe = ""

    def __init__(self, config, *, rngs):
        self.config = config
        self.model = FilesModel(config, rngs, self.moe)
        self.lm_head = nnx.Linear(config.hidden_size, config.vocab_size, use_bias=False, rngs=rngs)

    def logits(self, tokens):
        x = self.model.embed_tokens(tokens)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        for layer in self.model.layers:
            x = layer(x, tokens, positions)
        return self.lm_head(norm(x, self.model.norm.kernel[...], self.config.rms_norm_eps))


class MixtralForCausalLM(_ForCausalLM):
    """EasyDeL's names."""

    moe = "block_sparse_moe"


class GptOssForCausalLM(_ForCausalLM):
    """bonsai's names, and all of GPT-OSS's arithmetic but the scaling of its positions."""

    moe = "mlp"


def greedy(model, prompt, count, width=64):
    """Tokens that the module's own forward gives, every one from the whole sequence."""
    forward = nnx.jit(lambda model, tokens: model.logits(tokens))
    tokens = list(prompt)
    for _ in range(count):
        padded = jnp.array([tokens + [0] * (width - len(tokens))])
        tokens.append(int(forward(model, padded)[0, len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]
