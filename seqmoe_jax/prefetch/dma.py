"""Prefetch behind XLA's back: copies from the pinned pool straight into reserved slots, on a stream of their own.

The worker (`prefetch.worker`) reads plans and progress that the running step writes into host memory, and acknowledges
transfers by sending tags after them, which the step's kernels read, so an expert can land in the middle of a step. XLA
knows nothing of these writes: they go to slots in FETCH only, which no kernel reads, and the slot array must not move
(`check`).
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Shaped

from seqmoe_jax.prefetch.compiled import address_of
from seqmoe_jax.prefetch.cuda import CopyStream
from seqmoe_jax.prefetch.engine import EngineConfig, TransferCounts, typical_transfer_cost
from seqmoe_jax.prefetch.link import LiveLink
from seqmoe_jax.prefetch.schedule import SCHEDULERS
from seqmoe_jax.prefetch.state import OUTBOX, SETUP, SHARED, STEP, TRANSFER, record
from seqmoe_jax.prefetch.tasks import TASK
from seqmoe_jax.prefetch.worker import work

log = logging.getLogger("seqmoe_jax")

PART_BYTES = 1 << 20  # of an expert per copy: 20 us of a PCIe 5 x16 link, which runs at 47 of 54 GB/s so
TYPICAL_LAYER_NS = 55e3  # until it is measured
SLOWEST_PAUSE_S = 10.0
FOLLOWED_STEPS = 64  # dispatches between two looks at the measured transfer cost and at the worker


class Calls(NamedTuple):
    """Addresses of the driver's functions, or of what takes their place: see `state.SETUP`."""

    memcpy: int
    event_record: int
    event_query: int


class Dma:
    """See the module. `calls` takes the place of the CUDA driver where there is none.

    `setup` is what the worker looks up at every turn. The driver's functions there may be exchanged, for functions that
    behave worse.
    """

    name = "dma"
    ahead = 1
    run_ahead = 4
    channel: int | None = None

    def __init__(
        self,
        pools: tuple[Shaped[Array, "E n"], ...],
        device: jax.Device,
        config: EngineConfig,
        *,
        calls: Calls | None = None,
    ):
        self.config, self._device = config, device
        plan = config.plan
        self._board = _pinned(np.zeros(plan.board_words, np.int32), device)
        self._progress = _pinned(np.full(16, -1, np.int32), device)
        self._outbox = _pinned(np.zeros(OUTBOX, np.int32), device)
        self._tags = np.zeros(config.slots, np.int32)  # what the worker has sent to `_landed`
        self._pools, self._pool_addresses = pools, np.array([pool.unsafe_buffer_pointer() for pool in pools], np.int64)
        self._timespec = np.zeros(2, np.int64)
        self.setup, self.shared = record(SETUP), record(SHARED)
        setup, libc = self.setup, ctypes.CDLL(None)
        self._driver: CopyStream | None = None
        if calls is None:
            self._driver = driver = CopyStream(device, events=2)
            setup.stream, (setup.even_event, setup.odd_event) = driver.stream, driver.events
            calls = _calls_of(driver)
        setup.memcpy, setup.event_record, setup.event_query = calls
        setup.clock_gettime, setup.usleep = address_of(libc.clock_gettime), address_of(libc.usleep)
        setup.board, setup.progress, setup.outbox = (
            array.unsafe_buffer_pointer() for array in (self._board, self._progress, self._outbox)
        )
        setup.tags, setup.timespec = self._tags.ctypes.data, self._timespec.ctypes.data
        setup.pools = self._pool_addresses.ctypes.data
        setup.room, setup.layers, setup.experts = plan.tasks, plan.layers, plan.experts
        setup.expert_bytes, setup.part_bytes = config.expert_bytes, PART_BYTES
        setup.scheduler = SCHEDULERS[config.scheduler]
        self._forget_tags()
        # Corrected as soon as there is something to measure.
        self._known_cost = typical_transfer_cost(config.expert_bytes)
        self._rho = jax.device_put(np.float32(self._known_cost), device)
        self.shared.layer_ns, self.shared.transfer_ns = TYPICAL_LAYER_NS, self._known_cost * TYPICAL_LAYER_NS
        self.shared.average = self.shared.current = 1 / self._known_cost
        self._dispatched = 0
        self._fault: str | None = None
        self._thread: threading.Thread | None = None
        # Called once to no effect, so that it is compiled before anybody waits for it.
        self.shared.stop = self.shared.pause = 1
        work(*self._operands())

    @property
    def transfer_cost(self) -> float:
        return float(self.shared.transfer_ns / self.shared.layer_ns)

    def link(self) -> LiveLink:
        self._dispatched += 1
        if self._dispatched % FOLLOWED_STEPS == 0:
            self._follow()
        return LiveLink(transfer_cost=self._rho, landed=self._landed, progress=self._progress, board=self._board)

    def deliver(self, tasks: Any, clock: Any) -> None:
        pass  # the step has written its plans to the board

    def start(self, blocks: Shaped[Array, "S n"]) -> None:
        address = blocks.unsafe_buffer_pointer()
        if self._thread is None or address != self.setup.blocks:
            self._launch(address)
        self._forget_tags()
        self.shared.idle = 0
        self.shared.pause = 0

    def check(self, blocks: Shaped[Array, "S n"]) -> None:
        if blocks.unsafe_buffer_pointer() != self.setup.blocks:
            self.shared.stop = 1
            raise RuntimeError(
                "the slot cache has moved in device memory while transfers into it were under way; "
                "its contents cannot be trusted: load the model again, with another transfer engine"
            )

    def pause(self) -> None:
        self.shared.pause = 1
        begun = time.perf_counter()
        while self._alive() and not self.shared.idle:
            if time.perf_counter() - begun > SLOWEST_PAUSE_S:
                raise RuntimeError(f"the transfer worker did not come to rest within {SLOWEST_PAUSE_S:.0f} s")
            time.sleep(20e-6)
        # A worker that has died may have left copies in flight: they end before anybody gets their slot.
        if self._driver is not None:
            self._driver.synchronize()

    def counts(self) -> TransferCounts:
        shared = self.shared
        return TransferCounts(
            landed=int(shared.landed), given_up=int(shared.given_up), late=int(shared.late), bytes=int(shared.bytes)
        )

    def fault(self) -> str | None:
        fault, self._fault = self._fault, None
        return fault

    def close(self) -> None:
        self.shared.stop = 1
        if self._thread is not None:
            self._thread.join(timeout=SLOWEST_PAUSE_S)
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()

    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _follow(self) -> None:
        """Gives the step a new RHO where it has changed much; notices a worker that has died."""
        if abs(self.transfer_cost / self._known_cost - 1) > 0.15:
            self._known_cost = self.transfer_cost
            self._rho = jax.device_put(np.float32(self._known_cost), self._device)
        if not self._alive() and not self.shared.pause and self._fault is None:
            self._fault = f"the transfer worker has stopped (status {self.shared.failed}); loading on demand"
            log.warning(self._fault)
            self._forget_tags()  # nobody is to wait for what was in flight
            self.shared.pause = 1

    def _forget_tags(self) -> None:
        """A new array of tags, all zero, while the worker rests. Steps under way still read the old one."""
        if self._driver is not None:
            self._driver.synchronize()  # tags on their way still go to the old one, which may be freed from here on
        self._tags[:] = 0
        self._landed = jax.device_put(np.zeros_like(self._tags), self._device).block_until_ready()
        self.shared.device_tags = self._landed.unsafe_buffer_pointer()

    def _launch(self, address: int) -> None:
        if self._thread is not None:
            self.shared.stop = 1
            self._thread.join()
        self.setup.blocks = address
        self.shared.stop = 0
        operands = self._operands()

        def run() -> None:
            if self._driver is not None:
                self._driver.enter()
            wake_promptly()
            work(*operands)

        self._thread = threading.Thread(target=run, name="seqmoe-dma", daemon=True)
        self._thread.start()

    def _operands(self) -> tuple[Any, ...]:
        step, tasks = record(STEP), np.zeros(self.config.plan.tasks, TASK).view(np.recarray)
        step.word = step.position = -1
        return self.setup, self.shared, step, record(TRANSFER), tasks


def wake_promptly() -> None:
    """Lets naps of the calling thread end on time; Linux gives others 50 us to be woken together."""
    set_timer_slack, nanoseconds = 29, 1_000
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # absent elsewhere: naps are longer there
    if prctl is not None:
        prctl(set_timer_slack, ctypes.c_ulong(nanoseconds))


def _pinned(values: np.ndarray, device: jax.Device) -> Array:
    """An array in host memory that device programs read and write in place."""
    array: Array = jax.device_put(values, SingleDeviceSharding(device, memory_kind="pinned_host"))
    return array.block_until_ready()


def _calls_of(driver: CopyStream) -> Calls:
    """What the worker calls of the CUDA driver."""
    names = ("cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuEventQuery")
    return Calls(*(address_of(getattr(driver.library, name)) for name in names))
