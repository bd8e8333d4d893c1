"""`router_choice` for NVIDIA GPUs: one program per token; K rounds of the highest score, the lowest index first.

Where the router is small, `norm_and_choose` makes the scores too: one launch instead of two.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.fused_moe import tiles
from pallas_kernels.norm import Norm
from pallas_kernels.router_choice.config import ROUTER_COLUMNS, Choice, Recorded

OUTSIDE = 1 << 30  # index of no expert


def router_choice(
    logits: Float32[Array, "B E"],
    active: Bool[Array, " B"],
    *,
    choice: Choice,
    bias: Float[Array, " E"] | None = None,
    correction: Float32[Array, " E"] | None = None,
    recorded: Recorded | None = None,
    interpret: bool = False,
) -> tuple[Int32[Array, "B K"], Float32[Array, "B K"]]:
    """Experts of every token, best first, and their weights; experts are -1 for tokens that are not `active`.

    Scores are of the logits plus `bias`; experts are chosen with `correction` added and weighed without.
    """
    extra = _Extra.of(bias, correction, recorded)
    ids, weights = pl.pallas_call(
        partial(_choice_kernel, choice=choice, extra=extra.present),
        out_shape=_chosen(logits.shape[0], choice),
        grid=(logits.shape[0],),
        # One warp: a reduction over several would synchronise them three times a round.
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="router_choice",
    )(logits, active.astype(jnp.int32), *extra.arrays)
    return ids, weights


def norm_and_choose(
    x: Float[Array, "B H"],
    w: Float[Array, "E H"],
    active: Bool[Array, " B"],
    *,
    norm: Norm,
    norm_weight: Float[Array, " H"],
    choice: Choice,
    bias: Float[Array, " E"] | None = None,
    correction: Float32[Array, " E"] | None = None,
    recorded: Recorded | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B H"], Int32[Array, "B K"], Float32[Array, "B K"]]:
    """The normed `x`, and `router_choice` of its products with the rows of `w`, which are float32 sums.

    A token's program reads all of `w` by itself: for matrices of up to `MAX_ROUTER_BYTES`.
    """
    extra = _Extra.of(bias, correction, recorded)
    normed, ids, weights = pl.pallas_call(
        partial(_norm_kernel, norm=norm, choice=choice, extra=extra.present),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), *_chosen(x.shape[0], choice)],
        grid=(x.shape[0],),
        compiler_params=plgpu.CompilerParams(num_warps=16, num_stages=1),
        interpret=interpret,
        name="router",
    )(x, w, norm_weight, active.astype(jnp.int32), *extra.arrays)
    return normed, ids, weights


def _chosen(batch: int, choice: Choice) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((batch, choice.top_k), dtype) for dtype in (jnp.int32, jnp.float32)]


class _Extra(NamedTuple):
    """What a choice may read beside the scores, as arrays for a kernel or as its references."""

    bias: Any
    correction: Any
    recorded: Any  # (ids, weights, row)
    layer: int | None  # of what is recorded

    @classmethod
    def of(cls, bias: Any, correction: Any, recorded: Recorded | None) -> _Extra:
        return cls(bias, correction, recorded and recorded[:3], recorded and recorded.layer)

    @property
    def present(self) -> tuple[bool, bool, int | None]:
        return self.bias is not None, self.correction is not None, self.layer

    @property
    def arrays(self) -> list[Array]:
        return [x for x in (self.bias, self.correction, *(self.recorded or ())) if x is not None]

    @classmethod
    def among(cls, refs: list[Any], present: tuple[bool, bool, int | None]) -> _Extra:
        """Takes them off the front of `refs`."""
        biased, corrected, layer = present
        bias = refs.pop(0) if biased else None
        correction = refs.pop(0) if corrected else None
        return cls(bias, correction, None if layer is None else [refs.pop(0) for _ in range(3)], layer)


def _choice_kernel(
    logits_ref: Any, active_ref: Any, *refs: Any, choice: Choice, extra: tuple[bool, bool, int | None]
) -> None:
    rest = list(refs)
    beside = _Extra.among(rest, extra)
    b, experts = pl.program_id(0), logits_ref.shape[1]
    lanes = jnp.arange(pl.next_power_of_2(experts), dtype=jnp.int32)
    inside = lanes < experts
    logits = plgpu.load(logits_ref.at[b, jnp.where(inside, lanes, 0)], mask=inside, other=-jnp.inf)
    _choose(logits, active_ref[b], b, experts, beside, *rest, choice=choice)


def _norm_kernel(
    x_ref: Any, w_ref: Any, norm_ref: Any, active_ref: Any, *refs: Any,
    norm: Norm, choice: Choice, extra: tuple[bool, bool, int | None],
) -> None:  # fmt: skip
    rest = list(refs)
    beside = _Extra.among(rest, extra)
    normed_ref, *outs = rest
    b, (experts, width) = pl.program_id(0), w_ref.shape
    lanes = jnp.arange(pl.next_power_of_2(experts), dtype=jnp.int32)
    starts = range(0, width, ROUTER_COLUMNS)
    block = min(ROUTER_COLUMNS, pl.next_power_of_2(width))
    columns = [start + jnp.arange(block, dtype=jnp.int32) for start in starts]
    inside = [None if start + block <= width else index < width for start, index in zip(starts, columns, strict=True)]
    shape = lanes.shape[0], block
    matrix = [
        tiles.load(
            w_ref.at[jnp.broadcast_to(lanes[:, None], shape), jnp.broadcast_to(index[None], shape)],
            tiles.both(None if lanes.shape[0] == experts else lanes < experts, mask, shape),
        )
        for index, mask in zip(columns, inside, strict=True)
    ]
    pieces = [
        tiles.load(x_ref.at[b, index], mask).astype(jnp.float32) for index, mask in zip(columns, inside, strict=True)
    ]
    mean_square = functools.reduce(jnp.add, [jnp.sum(piece * piece) for piece in pieces]) / width
    logits = jnp.zeros(lanes.shape, jnp.float32)
    for tile, piece, index, mask in zip(matrix, pieces, columns, inside, strict=True):
        normed = norm.scaled(piece, mean_square, tiles.load(norm_ref.at[index], mask), x_ref.dtype)
        plgpu.store(normed_ref.at[b, index], normed, mask=mask)
        logits += jnp.sum(tile.astype(jnp.float32) * normed.astype(jnp.float32)[None], axis=1)
    _choose(jnp.where(lanes < experts, logits, -jnp.inf), active_ref[b], b, experts, beside, *outs, choice=choice)


def _choose(
    logits: Float32[Array, " lanes"], active: Array, b: Array, experts: int, extra: _Extra, ids_ref: Any,
    weights_ref: Any, *, choice: Choice,
) -> None:  # fmt: skip
    lanes = jnp.arange(logits.shape[0], dtype=jnp.int32)
    inside = lanes < experts
    index = jnp.where(inside, lanes, 0)
    if extra.bias is not None:
        bias = plgpu.load(extra.bias.at[index], mask=inside, other=jnp.zeros((), extra.bias.dtype))
        logits += bias.astype(jnp.float32)
    if choice.score == "softmax":
        powers = jnp.exp(logits - jnp.max(logits))
        scores = powers / jnp.sum(powers)
    elif choice.score == "sigmoid":
        scores = 1.0 / (1.0 + jnp.exp(-logits))
    elif choice.score == "sqrt-softplus":
        scores = jnp.sqrt(jnp.maximum(logits, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(logits))))
    else:
        scores = logits
    ranked = scores
    if extra.correction is not None:
        ranked = scores + plgpu.load(extra.correction.at[index], mask=inside, other=0.0)
    ranked = jnp.where(inside, ranked, -jnp.inf)

    places = jnp.arange(pl.next_power_of_2(choice.top_k), dtype=jnp.int32)
    ids, chosen = jnp.zeros_like(places), jnp.zeros(places.shape, jnp.float32)
    for k in range(choice.top_k):
        best = jnp.min(jnp.where(inside & (ranked == jnp.max(ranked)), lanes, OUTSIDE))
        best = jnp.minimum(best, experts - 1)  # also where logits are no numbers
        ids = jnp.where(places == k, best, ids)
        chosen = jnp.where(places == k, jnp.sum(jnp.where(lanes == best, scores, 0.0)), chosen)
        ranked = jnp.where(lanes == best, -jnp.inf, ranked)
        inside = inside & (lanes != best)
    real = places < choice.top_k
    if choice.score == "chosen-softmax":
        powers = jnp.where(real, jnp.exp(chosen - jnp.max(jnp.where(real, chosen, -jnp.inf))), 0.0)
        chosen = powers / jnp.sum(powers)
    if choice.normalize:
        chosen = chosen / (jnp.sum(jnp.where(real, chosen, 0.0)) + choice.eps)
    chosen = chosen * choice.scale
    if choice.rounded_to is not None:
        chosen = chosen.astype(choice.rounded_to).astype(jnp.float32)
    if extra.recorded is not None:
        # Depends on the choice, so that its work is done and timed.
        forced_ids, forced_weights, row = extra.recorded
        at = row[...], jnp.int32(extra.layer), jnp.where(real, places, 0)
        ids = jnp.where(ids < experts, plgpu.load(forced_ids.at[at], mask=real, other=0), ids)
        chosen = plgpu.load(forced_weights.at[at], mask=real, other=0.0)
    to = jnp.where(real, places, OUTSIDE)
    plgpu.store(ids_ref.at[b, to], jnp.where(active != 0, ids, -1), mask=real)
    plgpu.store(weights_ref.at[b, to], chosen, mask=real)
