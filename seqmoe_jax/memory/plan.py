"""How many slots a model gets, and what the device must hold for it. All sizes are in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np

from seqmoe_jax.decode.state import empty_sequences
from seqmoe_jax.errors import ConfigError, ResidencyError
from seqmoe_jax.models.spec import ModelSpec
from seqmoe_jax.options import MAX_BATCH, Residency
from seqmoe_jax.prefill import lengths
from seqmoe_jax.prefill.experts import ROWS_PER_BLOCK
from seqmoe_jax.prefill.lengths import PASS_CHUNKS, bucket, capacity_of, lanes_for

DEFAULT_CONTEXT = 4096  # memory is planned for the whole context: a longer one has to be asked for


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What a choice of slots, context and batch needs of device memory."""

    slots: int
    residency: float  # slots / experts of all layers
    dense: int  # all weights but the experts'
    slot_cache: int
    kv: int  # what the mixers keep of the sequences' past
    workspace: int
    forecast: int = 0  # the predictor's weights
    pass_chunks: int = PASS_CHUNKS[-1]  # of prompts that pass a layer together: more need more workspace

    @property
    def total(self) -> int:
        return self.dense + self.slot_cache + self.kv + self.workspace + self.forecast

    def describe(self) -> str:
        parts = {"weights": self.dense, "slots": self.slot_cache, "KV": self.kv, "workspace": self.workspace}
        if self.forecast:
            parts["forecast"] = self.forecast
        listed = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
        return f"{self.total / 1e9:.2f} GB on the device ({listed})"


def least_slots(spec: ModelSpec, batch: int) -> int:
    """The fewest slots that work: one layer of one step can need min(B * K, E) experts at once."""
    return min(batch * spec.moe.top_k, spec.moe.num_experts)


def dense_bytes(spec: ModelSpec, activations: np.dtype | type) -> int:
    """The size of all weights but the experts'. Tensors without a dtype of their own are held in `activations`."""
    return sum(tensor.nbytes(np.dtype(activations)) for tensor in spec.tensors().values())


def state_bytes(spec: ModelSpec, batch: int, context: int, activations: np.dtype | type) -> int:
    """The size of what the mixers keep of the sequences' past.

    Of several sequences each is read by itself, and the layers are joined one after another: then one layer is there
    twice.
    """
    lanes = lanes_for(batch)
    capacity, dtype = capacity_of([context], [0]), np.dtype(activations)
    init = partial(empty_sequences, spec=spec, batch=lanes, capacity=capacity, dtype=dtype)
    layers = [
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) for state in jax.eval_shape(init).states
    ]
    return sum(layers) + (max(layers) if lanes > 1 else 0)


def workspace_bytes(spec: ModelSpec, batch: int, context: int, pass_chunks: int = PASS_CHUNKS[-1]) -> int:
    """An upper estimate of temporaries: those of a pass of prefill with the widest of its parts, or the logits."""
    moe, chunk, rows = spec.moe, lengths.CHUNK, ROWS_PER_BLOCK
    tokens = chunk * min(pass_chunks, bucket(batch * -(-context // chunk) * chunk) // chunk)
    blocks = -(-tokens * moe.top_k // rows) + min(moe.num_experts, tokens * moe.top_k)
    # Expert outputs and hidden activations of the experts, in float32, and a chunk's sums over them.
    grouped = blocks * rows * 4 * (spec.hidden + moe.width) + 8 * chunk * spec.hidden
    mixing = max(layer.mixer.workspace_bytes(1, chunk, capacity_of([context], [0])) for layer in spec.layers)
    # The streams of the pass and what their experts read; of a chunk also a copy in float32.
    streams = math.prod(spec.token_shape) * (4 * tokens + 8 * chunk) + 4 * tokens * spec.hidden
    routing = 8 * spec.num_keys // moe.num_experts * tokens * moe.top_k
    return max(grouped, mixing, 8 * batch * spec.vocab) + streams + routing + (64 << 20)


def _with_long_passes(plan: MemoryPlan, spec: ModelSpec, batch: int, context: int, *, limit: int | None) -> MemoryPlan:
    """The plan with the longest passes for which there is room within `limit`: an expert moves once for each pass."""
    for chunks in PASS_CHUNKS:
        longer = replace(plan, workspace=workspace_bytes(spec, batch, context, chunks), pass_chunks=chunks)
        if longer.workspace <= plan.workspace or (limit is not None and longer.total <= limit):
            return longer
    return plan


def plan_memory(
    spec: ModelSpec,
    *,
    residency: Residency | None = None,
    device_memory: int | None = None,
    available: int | None = None,
    batch: int = 1,
    context: int = DEFAULT_CONTEXT,
    activation_dtype: np.dtype | type = np.float32,
    forecast: int = 0,
) -> MemoryPlan:
    """Chooses slots by a residency, by a budget in bytes, or by what the device has `available`.

    `forecast` is the size of the predictor's weights. Without a residency and a limit every expert gets a slot.
    Raises `ResidencyError` where the residency is out of range, too small for K and B, or does not fit.
    """
    if residency is not None and device_memory is not None:
        raise ConfigError("give either a residency or a device memory, not both")
    if not 1 <= batch <= MAX_BATCH:
        raise ConfigError(f"a batch has 1 to {MAX_BATCH} sequences, got {batch}")
    if context < 1:
        raise ConfigError(f"a context has at least 1 token, got {context}")
    fixed = dict(
        dense=dense_bytes(spec, activation_dtype),
        kv=state_bytes(spec, batch, context, activation_dtype),
        workspace=workspace_bytes(spec, batch, context),
        forecast=forecast,
    )
    block = spec.expert_layout.block_bytes
    least = least_slots(spec, batch)
    share = least / spec.num_keys
    lowest = f"the least is {least} slots (residency {share:.4f}) for {batch} sequence(s), K={spec.moe.top_k}"
    budget = device_memory if device_memory is not None else available
    if residency == "least":
        slots = least
    elif residency is not None:
        if not 0 < residency <= 1:
            raise ResidencyError(f"residency must be in (0, 1], got {residency}; {lowest}")
        slots = int(residency * spec.num_keys + 1e-9)
        if slots < least:
            raise ResidencyError(f"residency {residency} gives {slots} of {spec.num_keys} experts a slot; {lowest}")
    elif budget is None:
        slots = spec.num_keys
    else:
        slots = min((budget - sum(fixed.values())) // block, spec.num_keys)
        if slots < least:
            need = sum(fixed.values()) + least * block
            raise ResidencyError(
                f"{budget / 1e9:.2f} GB of device memory is not enough: this model needs at least {need / 1e9:.2f} GB "
                f"with context {context} and batch {batch}; allow more, or shorten the context"
            )
    plan = MemoryPlan(slots=slots, residency=slots / spec.num_keys, slot_cache=slots * block, **fixed)
    plan = _with_long_passes(plan, spec, batch, context, limit=budget if budget is not None else available)
    if available is not None and plan.total > available:
        raise ResidencyError(
            f"residency {plan.residency:.3f} needs {plan.describe()} but {available / 1e9:.2f} GB are available; "
            "lower the residency, the context or the batch"
        )
    return plan
