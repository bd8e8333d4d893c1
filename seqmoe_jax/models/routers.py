"""Routers: which K of E experts a token goes to, and with which weights.

All kinds score every expert, choose by score (or by score plus a learned correction, within the best groups), and
weigh by the score alone. The lowest index wins among equal scores. T tokens, H hidden, E experts, K active.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32

from seqmoe_jax.models.layers import einsum
from seqmoe_jax.models.tensors import FLOAT32, INT32, Take, Tensor, Tensors


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Experts are chosen from the best `topk_group` of `n_group` equal groups (DeepSeek-V2 and V3).

    score: a group counts as much as its best expert ("max"), or as the sum of its best two ("top2").
    """

    n_group: int
    topk_group: int
    score: Literal["max", "top2"]


class RouterWeights(NamedTuple):
    weight: Float[Array, "E H"]
    bias: Float[Array, " E"] | None = None
    correction_bias: Float32[Array, " E"] | None = None
    table: Int32[Array, "V K"] | None = None


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How tokens are routed.

    score: "softmax" or "sigmoid" of the logits over all experts, "sqrt-softplus", the root of their softplus, or
        "chosen-softmax", the softmax over the logits of the chosen experts alone.
    bias: a bias is added to the logits.
    correction_bias: a learned value per expert is added to its score for choosing, not for weighing (arXiv 2408.15664).
    hashed: the size of a table that says which experts each token of the vocabulary goes to (DeepSeek-V4's first
        layers); None where experts are chosen by score.
    normalize, scale: weights are divided by their sum plus `eps` (norm_topk_prob), and multiplied by `scale`
        (routed_scaling_factor).
    rounded: weights pass through the activations' dtype, as the reference implementation has it.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "sqrt-softplus", "chosen-softmax"] = "softmax"
    bias: bool = False
    correction_bias: bool = False
    hashed: int | None = None
    groups: Groups | None = None
    normalize: bool = False
    eps: float = 0.0
    scale: float = 1.0
    rounded: bool = True

    def tensors(self, hidden: int) -> Tensors:
        tensors = {"weight": Tensor(shape=(self.num_experts, hidden))}
        if self.bias:
            tensors["bias"] = Tensor(shape=(self.num_experts,), init="zeros")
        if self.correction_bias:
            tensors["correction_bias"] = Tensor(shape=(self.num_experts,), init="zeros", dtype=FLOAT32)
        if self.hashed is not None:
            tensors["table"] = Tensor(
                shape=(self.hashed, self.top_k), init="cycle", period=self.num_experts, dtype=INT32
            )
        return tensors

    def assemble(self, take: Take) -> RouterWeights:
        return RouterWeights(
            weight=take("weight"),
            bias=take("bias") if self.bias else None,
            correction_bias=take("correction_bias") if self.correction_bias else None,
            table=take("table") if self.hashed is not None else None,
        )

    def __call__(
        self, x: Float[Array, "T H"], tokens: Int[Array, " T"], weights: RouterWeights
    ) -> tuple[Int[Array, "T K"], Float32[Array, "T K"]]:
        """Expert ids and their weights. `tokens` are the tokens' ids, for routers that look experts up by them."""
        logits = einsum("th,eh->te", x, weights.weight)
        if weights.bias is not None:
            logits = logits + weights.bias.astype(jnp.float32)
        match self.score:
            case "softmax":
                scores = jax.nn.softmax(logits, axis=-1)
            case "sigmoid":
                scores = jax.nn.sigmoid(logits)
            case "sqrt-softplus":
                scores = jnp.sqrt(jax.nn.softplus(logits))
            case "chosen-softmax":
                scores = logits
        if weights.table is not None:
            ids = hash_experts(tokens, weights.table)
        else:
            choice = scores if weights.correction_bias is None else scores + weights.correction_bias
            _, ids = lax.top_k(choice if self.groups is None else _of_best_groups(choice, self.groups), self.top_k)
        chosen = jnp.take_along_axis(scores, ids, axis=-1)
        if self.score == "chosen-softmax":
            chosen = jax.nn.softmax(chosen, axis=-1)
        if self.normalize:
            chosen = chosen / (chosen.sum(axis=-1, keepdims=True) + self.eps)
        chosen = chosen * self.scale
        return ids, chosen.astype(x.dtype).astype(jnp.float32) if self.rounded else chosen


def hash_experts(tokens: Int[Array, "*T"], table: Int32[Array, "V K"]) -> Int32[Array, "*T K"]:
    """The experts of a hash-routed layer. They are known as soon as a token is, so their prefetch is exact."""
    return table[tokens]


def _of_best_groups(choice: Float32[Array, "T E"], groups: Groups) -> Float32[Array, "T E"]:
    """Minus infinity for experts outside the best groups."""
    grouped = choice.reshape(choice.shape[0], groups.n_group, -1)
    best = lax.top_k(grouped, 1 if groups.score == "max" else 2)[0].sum(axis=-1)
    _, kept = lax.top_k(best, groups.topk_group)
    inside = (kept[:, :, None] == jnp.arange(groups.n_group)).any(axis=1)
    return jnp.where(inside[:, :, None], grouped, -jnp.inf).reshape(choice.shape)
