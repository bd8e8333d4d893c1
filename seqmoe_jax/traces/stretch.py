"""Routing for models of other shapes than a recorded one, made of the recording by a stated rule.

It keeps what caches and forecasts live on (which experts follow which, in step and in time) and no more: its hit rates
are those of a model that routes like the recorded one, not of the model whose shape it has.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Int

from seqmoe_jax.errors import TraceError
from seqmoe_jax.traces.format import Trace


def stretch(trace: Trace, *, layers: int, experts: int, active: int) -> Trace:
    """The trace as routing of `active` among `experts` experts in each of `layers` layers; itself where it is that.

    Of a trace with k active among e experts in l layers, split by split and sequence by sequence:
    * Layer i reads layer i % l. Layers l to 2l - 1, and so on, read it from another sequence, so that they route as
      differently as other text would: that of the next greater length of the split, in a circle (read again from its
      beginning where it is too short).
    * `active` experts are active / k streams, which read different sequences in the same way; of the last one the
      heaviest experts alone, where active is no multiple of k.
    * The experts / e groups of e experts are dealt out to the streams in turn. Expert x of a stream is x in one of its
      groups, that which a digit of the step's heaviest expert says, so that each group is used more rarely.
    * Weights are the trace's, divided by the number of streams. Tokens are those of the sequence itself.

    Raises `TraceError` unless there are k active experts or more, and e experts for each stream.
    """
    e, k = trace.num_experts, trace.active
    if (layers, experts, active) == (trace.layers, e, k):
        return trace
    streams, groups = -(-active // k), experts // e
    if active < k or groups < streams:
        raise TraceError(
            f"routing of {k} of {e} experts cannot be stretched to {active} of {experts}: "
            f"expected {k} active or more, and at least {max(1, streams) * e} experts"
        )
    ids = np.empty((trace.steps, layers, active), np.uint8 if experts <= 256 else np.uint16)
    probs = np.empty((trace.steps, layers, active), np.uint8)
    width = groups // streams  # groups of a stream
    for above in range(-(-layers // trace.layers)):
        for stream in range(streams):
            rows = _rows_of_partner(trace, above * streams + stream)
            here = slice(above * trace.layers, min((above + 1) * trace.layers, layers))
            source = slice(0, here.stop - here.start)
            part = slice(stream * k, min((stream + 1) * k, active))
            read = trace.ids[rows, source].astype(np.int32)
            group = stream + streams * (read[..., :1] % width)
            ids[:, here, part] = (group * e + read)[..., : part.stop - part.start]
            probs[:, here, part] = trace.probs_u8[rows, source][..., : part.stop - part.start] // streams
    if streams > 1:  # the heaviest first, as the format has it
        order = np.argsort(255 - probs, axis=-1, kind="stable")
        ids, probs = np.take_along_axis(ids, order, -1), np.take_along_axis(probs, order, -1)
    name = f"{trace.model or 'trace'}, stretched to {layers} x {active} of {experts}"
    return replace(
        trace,
        ids=ids,
        probs_u8=probs,
        num_experts=experts,
        layer_index=np.arange(layers, dtype=np.int32),
        metadata={**trace.metadata, "model": np.asarray(name)},
    )


def _rows_of_partner(trace: Trace, distance: int) -> Int[np.ndarray, " T"]:
    """For every step, the row of the sequence that is `distance` places on in its split's order of lengths."""
    splits = np.zeros(trace.sequences, "U1") if trace.split is None else trace.split
    starts, lens = trace.seq_offsets[:-1].astype(np.int64), trace.lens.astype(np.int64)
    partner = np.empty(trace.sequences, np.int64)
    for split in np.unique(splits):
        members = np.flatnonzero(splits == split)
        members = members[np.argsort(lens[members], kind="stable")]
        partner[members] = np.roll(members, -distance)
    within = np.arange(trace.steps) - np.repeat(starts, lens)
    return np.repeat(starts[partner], lens) + within % np.repeat(lens[partner], lens)
