"""Routers: which K of E experts a token goes to, and with which weights.

All kinds score every expert, choose by score (or by score plus a learned correction, within the best groups), and
weigh by the score alone. The lowest index wins among equal scores. T tokens, H hidden, E experts, K active.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32

from pallas_kernels.arithmetic import einsum
from pallas_kernels.router_choice.config import Choice, Score
from pallas_kernels.router_choice.reference import scores_of, weights_of
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

    score, normalize, eps, scale: as of `Choice`.
    bias: a bias is added to the logits.
    correction_bias: a learned value per expert is added to its score for choosing, not for weighing (arXiv 2408.15664).
    hashed: the size of a table that says which experts each token of the vocabulary goes to (DeepSeek-V4's first
        layers); None where experts are chosen by score.
    rounded: weights pass through the activations' dtype, as the reference implementation has it.
    """

    num_experts: int
    top_k: int
    score: Score = "softmax"
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
        scores = scores_of(einsum("th,eh->te", x, weights.weight), weights.bias, self.score)
        if weights.table is not None:
            ids = hash_experts(tokens, weights.table)
        else:
            choice = scores if weights.correction_bias is None else scores + weights.correction_bias
            _, ids = lax.top_k(choice if self.groups is None else _of_best_groups(choice, self.groups), self.top_k)
        return ids, weights_of(scores, ids, self.choice(x.dtype))

    def choice(self, dtype: jnp.dtype) -> Choice:
        """Score and weights in the kernel's terms, for activations of `dtype`."""
        return Choice(
            top_k=self.top_k, score=self.score, normalize=self.normalize, eps=self.eps, scale=self.scale,
            rounded_to=jnp.dtype(dtype) if self.rounded else None,
        )  # fmt: skip


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
