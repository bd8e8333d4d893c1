"""`router_choice` for NVIDIA GPUs: one program per token; K rounds of the highest score, the lowest index first."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.masks import OUTSIDE
from pallas_kernels.router_choice.config import Choice, Recorded


def router_choice(
    logits: Float32[Array, "B E"],
    active: Bool[Array, " B"],
    *,
    choice: Choice,
    bias: Float[Array, " E"] | None,
    correction: Float32[Array, " E"] | None,
    recorded: Recorded | None,
    interpret: bool,
) -> tuple[Int32[Array, "B K"], Float32[Array, "B K"]]:
    """See `router_choice.api`."""
    batch = logits.shape[0]
    kernel = partial(
        _kernel, choice=choice, biased=bias is not None, corrected=correction is not None, forced=recorded is not None
    )  # fmt: skip
    optional = [bias, correction, *(recorded or ())]
    ids, weights = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((batch, choice.top_k), dtype) for dtype in (jnp.int32, jnp.float32)],
        grid=(batch,),
        # One warp: a reduction over several would synchronise them three times a round.
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="router_choice",
    )(logits, active.astype(jnp.int32), *(x for x in optional if x is not None))
    return ids, weights


def _kernel(
    logits_ref: Any, active_ref: Any, *refs: Any, choice: Choice, biased: bool, corrected: bool, forced: bool
) -> None:
    rest = list(refs)
    bias_ref = rest.pop(0) if biased else None
    correction_ref = rest.pop(0) if corrected else None
    *recorded, ids_ref, weights_ref = rest
    b, experts = pl.program_id(0), logits_ref.shape[1]
    lanes = jnp.arange(pl.next_power_of_2(experts), dtype=jnp.int32)
    inside = lanes < experts
    index = jnp.where(inside, lanes, 0)
    logits = plgpu.load(logits_ref.at[b, index], mask=inside, other=-jnp.inf)
    if bias_ref is not None:
        bias = plgpu.load(bias_ref.at[index], mask=inside, other=jnp.zeros((), bias_ref.dtype))
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
    if correction_ref is not None:
        ranked = scores + plgpu.load(correction_ref.at[index], mask=inside, other=0.0)
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
    if forced:
        # Depends on the choice, so that its work is done and timed.
        forced_ids_ref, forced_weights_ref, row_ref, layer_ref = recorded
        at = row_ref[...], layer_ref[...], jnp.where(real, places, 0)
        ids = jnp.where(ids < experts, plgpu.load(forced_ids_ref.at[at], mask=real, other=0), ids)
        chosen = plgpu.load(forced_weights_ref.at[at], mask=real, other=0.0)
    to = jnp.where(real, places, OUTSIDE)
    plgpu.store(ids_ref.at[b, to], jnp.where(active_ref[b] != 0, ids, -1), mask=real)
    plgpu.store(weights_ref.at[b, to], chosen, mask=real)
