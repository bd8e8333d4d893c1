"""What the worker of `dma` is given, shares and knows: records whose fields compiled code reads and writes by name."""

from __future__ import annotations

from typing import Any

import numpy as np

OUTBOX = 1024  # tags that may be on their way to the device; a handful are

# What does not change while a worker runs.
SETUP = np.dtype(
    [
        # Addresses of what it calls.
        ("memcpy", "i8"),  # (destination, source, bytes, stream) -> status, to the device, asynchronous
        ("event_record", "i8"),  # (event, stream) -> status
        ("event_query", "i8"),  # (event) -> 0 when everything before it is done
        ("clock_gettime", "i8"),  # (clock, timespec)
        ("usleep", "i8"),  # (us)
        # Addresses of memory of the host.
        ("board", "i8"),  # int32, pinned; the step writes plans there
        ("progress", "i8"),  # int32, pinned; the step writes its position there
        ("tags", "i8"),  # int32[S], what was sent to the device last for each slot
        ("outbox", "i8"),  # int32[OUTBOX], pinned; tags are sent from there
        ("pools", "i8"),  # int64[L], addresses of the layers' experts
        ("timespec", "i8"),  # int64[2], scratch
        # And of the device.
        ("blocks", "i8"),  # the slots
        ("stream", "i8"),
        ("even_event", "i8"),  # of parts sent
        ("odd_event", "i8"),
        ("room", "i8"),  # N, tasks of a plan
        ("layers", "i8"),
        ("experts", "i8"),
        ("expert_bytes", "i8"),
        ("part_bytes", "i8"),
        ("scheduler", "i8"),
    ],
    align=True,
)

# What the engine and its worker share.
SHARED = np.dtype(
    [
        ("stop", "i8"),  # the engine: the thread is to end
        ("pause", "i8"),  # the engine: nothing more is to be moved
        ("idle", "i8"),  # the worker: nothing is in flight, and nothing will be until `pause` is lifted
        ("device_tags", "i8"),  # the engine: address of the tags in device memory
        ("tags_sent", "i8"),
        ("transfer_ns", "f8"),  # of an expert, as measured
        ("layer_ns", "f8"),  # of a layer
        ("average", "f8"),  # budget of Algorithm 1: transfers per layer,
        ("current", "f8"),  # and what this layer has left of it
        # What the worker counts, in tasks but for `bytes`.
        ("landed", "i8"),
        ("given_up", "i8"),  # started and not completed
        ("late", "i8"),  # never started
        ("bytes", "i8"),  # moved, whether they landed or not
        ("plans", "i8"),  # read
        ("failed", "i8"),  # status of the copy that failed and ended the worker
    ],
    align=True,
)

# What the worker knows of the running step.
STEP = np.dtype(
    [
        ("plan", "i8"),  # number of the plan read last
        ("tasks", "i8"),  # of it that are left
        ("word", "i8"),  # of progress, as read last
        ("position", "i8"),
        ("layer_began", "i8"),  # ns
        ("missed", "i8"),  # whether this layer has loaded experts on demand
        ("quiet_until", "i8"),  # ns; until then the link is left to the device
    ],
    align=True,
)

# The transfer in flight. Parts complete in order, so counting them says which bytes have arrived.
TRANSFER = np.dtype(
    [
        ("tag", "i8"),  # 0: there is none
        ("slot", "i8"),
        ("deadline", "i8"),
        ("sent", "i8"),  # bytes
        ("source", "i8"),  # addresses
        ("target", "i8"),
        ("parts_sent", "i8"),
        ("parts_done", "i8"),
        ("began", "i8"),  # ns
        ("stalled", "i8"),  # whether it was interrupted by a miss
    ],
    align=True,
)


def record(fields: np.dtype[np.void]) -> Any:
    """Zeroed fields, to be read and written as attributes."""
    return np.zeros(1, fields).view(np.recarray)[0]
