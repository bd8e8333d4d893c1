"""Faults of the link between host and device, put between a transfer engine and what it copies with.

`device_put` copies with its `put`; `dma` with functions of the CUDA driver, whose addresses its worker looks up at
every call. Nothing in the engines knows of faults.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from pallas_kernels.slot_update import UNDER_WAY
from seqmoe_jax.prefetch.compiled import address_of
from seqmoe_jax.prefetch.device_put import DevicePut
from seqmoe_jax.prefetch.dma import Dma
from seqmoe_jax.prefetch.engine import TransferEngine
from seqmoe_jax.prefetch.link import StagedLink
from seqmoe_jax.prefetch.worker import TAG_BYTES

FAILED = 700  # the status of a copy that fails
_alive: list[Any] = []  # a worker may be inside of a function that was exchanged for another


@dataclass(kw_only=True)
class Faults:
    """How a link behaves. All at once, and they may be changed while it does."""

    throttle_s: float = 0.0  # between the beginnings of two copies
    delay_s: float = 0.0  # between the arrival of an expert and word of it
    drop_every: int = 0  # of every so many experts that arrive, one is reported as given up (0: none)
    broken: bool = False  # the next copy fails, which ends the worker
    dropped: int = field(default=0, init=False)
    _arrived: int = field(default=0, init=False)
    _begun: float = field(default=0.0, init=False)

    def before_copy(self) -> bool:
        """Waits as the throttle wants; whether the copy may be made."""
        time.sleep(max(0.0, self._begun + self.throttle_s - time.perf_counter()))
        self._begun = time.perf_counter()
        return not self.broken

    def drops(self) -> bool:
        """Whether the expert that has arrived now is one to be dropped."""
        self._arrived += 1
        dropped = self.drop_every > 0 and self._arrived % self.drop_every == 0
        self.dropped += dropped
        return dropped


@contextmanager
def injected(engine: TransferEngine, faults: Faults) -> Iterator[Faults]:
    """The engine's link has these faults for the time being."""
    if isinstance(engine, Dma):
        setup, memcpy = engine.setup, int(engine.setup.memcpy)
        faulty = _copy_with(faults, memcpy)
        _alive.append(faulty)
        setup.memcpy = address_of(faulty)
        try:
            yield faults
        finally:
            setup.memcpy = memcpy
    else:
        assert isinstance(engine, DevicePut)
        put, link = engine.put, engine.link
        engine.put, engine.link = _put_with(faults, put), _link_with(faults, link)  # type: ignore[method-assign]
        try:
            yield faults
        finally:
            engine.put, engine.link = put, link  # type: ignore[method-assign]


def _copy_with(faults: Faults, address: int) -> Any:
    """The driver's copy to the device. Experts and their tags come through it, the tag behind the expert."""
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * 4)
    memcpy = prototype(address)

    def copy(target: int, source: int, size: int, stream: int) -> int:
        if size == TAG_BYTES:
            tag = ctypes.c_int32.from_address(source)
            if 0 < tag.value < UNDER_WAY:
                time.sleep(faults.delay_s)
                if faults.drops():
                    tag.value = -tag.value
        elif not faults.before_copy():
            return FAILED
        return int(memcpy(target, source, size, stream))

    return prototype(copy)


def _put_with(faults: Faults, put: Any) -> Any:
    def faulty(expert: np.ndarray) -> jax.Array:
        if not faults.before_copy():
            raise RuntimeError(f"the link is broken ({FAILED})")
        block: jax.Array = put(expert)
        time.sleep(faults.delay_s)
        return block

    return faulty


def _link_with(faults: Faults, link: Any) -> Any:
    def faulty() -> StagedLink:
        given: StagedLink = link()
        tags = [-tag if tag > 0 and faults.drops() else tag for tag in np.array(given.arrivals.tag)]
        there = jax.device_put(np.array(tags, np.int32), given.arrivals.tag.sharding)
        return given._replace(arrivals=given.arrivals._replace(tag=there))

    return faulty
