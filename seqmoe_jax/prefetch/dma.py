"""Prefetch behind XLA's back: copies from the pinned pool straight into reserved slots, on a stream of their own.

The worker (`prefetch.worker`) reads plans and progress that the running step writes into host memory, and reports
transfers by sending tags after them, which the step's kernels read, so an expert can land in the middle of a step. XLA
knows nothing of these writes: they go to slots in FETCH only, which no kernel reads, and the slot array must not move
(`check`).
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Shaped

from seqmoe_jax.prefetch.compiled import address_of
from seqmoe_jax.prefetch.cuda import CopyStream
from seqmoe_jax.prefetch.engine import EngineConfig, Faults, Moved, pinned, typical_transfer_cost
from seqmoe_jax.prefetch.link import Link
from seqmoe_jax.prefetch.worker import SCHEDULERS, Calls, Control, Count, work

log = logging.getLogger("seqmoe_jax")

PART_BYTES = 1 << 20  # of an expert per copy: 20 us of a PCIe 5 x16 link, which runs at 47 of 54 GB/s so
SLOWEST_PAUSE_S = 10.0
LETTERS = 1024  # answers that may be on their way; a handful are
RHO_STEPS = 64  # dispatches between two looks at the measured transfer cost


class Dma:
    """See the module. `calls` replaces the CUDA driver in tests."""

    name = "dma"
    ahead = 1
    run_ahead = 4

    def __init__(
        self,
        pools: tuple[Shaped[Array, "E n"], ...],
        device: jax.Device,
        config: EngineConfig,
        *,
        calls: Calls | None = None,
    ):
        self.config, self._pools, self._device = config, pools, device
        plan = config.plan
        self._driver = None if calls is not None else CopyStream(device, events=2)
        self._functions = (calls or _calls_of(self._driver)).addresses()  # type: ignore[arg-type]  # one of them is there
        self._board, self._board_view = pinned(np.zeros(plan.board_words, np.int32), device)
        self._progress, self._progress_view = pinned(np.full(16, -1, np.int32), device)
        self._letters, self._letters_view = pinned(np.zeros(LETTERS, np.int32), device)
        self._answers = np.zeros(config.slots, np.int32)  # what the worker has sent to `_landed`
        self._post = np.array([0, self._letters.unsafe_buffer_pointer(), 0], np.int64)
        self._forget_answers()
        self._control = np.zeros(len(Control), np.int64)
        self._counts = np.zeros(len(Count), np.int64)
        # Corrected as soon as there is something to measure.
        self._rho_value = typical_transfer_cost(config.expert_bytes)
        self._rates = np.array([self._rho_value * 55e3, 55e3])
        self._budget = np.full(2, 1 / self._rho_value)
        self._rho = jax.device_put(np.float32(self._rho_value), device)
        self._pool_addresses = np.array([pool.unsafe_buffer_pointer() for pool in pools], np.int64)
        self._address, self._dispatched = 0, 0
        self._fault: str | None = None
        self._thread: threading.Thread | None = None
        # Called once to no effect, so that it is compiled before anybody waits for it.
        self._control[Control.STOP] = self._control[Control.PAUSE] = 1
        work(*self._arguments(0))

    def link(self) -> Link:
        self._dispatched += 1
        if self._dispatched % RHO_STEPS == 0:
            self._follow()
        return Link(transfer_layers=self._rho, landed=self._landed, progress=self._progress, board=self._board)

    def tell(self, tasks: Any, clock: Any) -> None:
        pass  # the step has told already

    def start(self, blocks: Shaped[Array, "rows n"]) -> None:
        address = blocks.unsafe_buffer_pointer()
        if self._thread is None or address != self._address:
            self._launch(address)
        self._forget_answers()
        self._control[Control.IDLE] = 0
        self._control[Control.PAUSE] = 0

    def check(self, blocks: Shaped[Array, "rows n"]) -> None:
        if blocks.unsafe_buffer_pointer() != self._address:
            self._control[Control.STOP] = 1
            raise RuntimeError(
                "the slot cache has moved in device memory while transfers into it were under way; "
                "its contents cannot be trusted: load the model again, with another transfer engine"
            )

    def pause(self) -> None:
        self._control[Control.PAUSE] = 1
        begun = time.perf_counter()
        while self._alive() and not self._control[Control.IDLE]:
            if time.perf_counter() - begun > SLOWEST_PAUSE_S:
                raise RuntimeError(f"the transfer worker did not come to rest within {SLOWEST_PAUSE_S:.0f} s")
            time.sleep(20e-6)
        # A worker that has died may have left copies under way: they end before anybody gets their slot.
        if self._driver is not None:
            self._driver.synchronize()

    def moved(self) -> Moved:
        counts = self._counts
        return Moved(
            landed=int(counts[Count.LANDED]), dropped=int(counts[Count.DROPPED]),
            given_up=int(counts[Count.GIVEN_UP]), late=int(counts[Count.LATE]), bytes=int(counts[Count.BYTES]),
        )  # fmt: skip

    def fault(self) -> str | None:
        fault, self._fault = self._fault, None
        return fault

    def close(self) -> None:
        self._control[Control.STOP] = 1
        if self._thread is not None:
            self._thread.join(timeout=SLOWEST_PAUSE_S)
        if self._driver is not None:
            self._driver.close()

    def inject(self, faults: Faults) -> None:
        self._control[Control.DROP_EVERY] = faults.drop_every
        self._control[Control.DELAY_NS] = int(faults.delay_s * 1e9)
        self._control[Control.THROTTLE_NS] = int(faults.throttle_s * 1e9)

    def kill(self) -> None:
        self._control[Control.STOP] = 1

    @property
    def transfer_cost(self) -> float:
        """RHO as measured: the time of a transfer over that of a layer."""
        return float(self._rates[0] / self._rates[1])

    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _follow(self) -> None:
        """Gives the step a new RHO where it has changed much; notices a worker that has died."""
        if abs(self.transfer_cost / self._rho_value - 1) > 0.15:
            self._rho_value = self.transfer_cost
            self._rho = jax.device_put(np.float32(self._rho_value), self._device)
        if not self._alive() and not self._control[Control.PAUSE] and self._fault is None:
            self._fault = f"the transfer worker has stopped (status {self._counts[Count.FAILED]}); loading on demand"
            log.warning(self._fault)
            self._forget_answers()  # nobody is to wait for what was under way
            self._control[Control.PAUSE] = 1

    def _forget_answers(self) -> None:
        """A new array of answers, all zero; the worker rests. Steps under way still read the old one."""
        if self._driver is not None:
            self._driver.synchronize()  # answers on their way still go to the old one, which may be freed from here on
        self._answers[:] = 0
        self._landed = jax.device_put(np.zeros(self.config.slots, np.int32), self._device).block_until_ready()
        self._post[0] = self._landed.unsafe_buffer_pointer()

    def _arguments(self, address: int) -> tuple[Any, ...]:
        plan, driver = self.config.plan, self._driver
        sizes = np.array([plan.tasks, plan.experts, self.config.expert_bytes, PART_BYTES, plan.layers], np.int64)
        stream, events = (0, np.zeros(2, np.int64)) if driver is None else (driver.stream, driver.events)
        return (
            self._board_view, self._progress_view, self._answers, self._letters_view, self._post, self._control,
            self._counts, self._rates, self._budget, self._pool_addresses, np.int64(address), sizes, np.int64(stream),
            events, np.int64(SCHEDULERS[self.config.scheduler]), self._functions,
        )  # fmt: skip

    def _launch(self, address: int) -> None:
        if self._thread is not None:
            self._control[Control.STOP] = 1
            self._thread.join()
        self._address = address
        self._control[Control.STOP] = 0
        arguments = self._arguments(address)

        def run() -> None:
            if self._driver is not None:
                self._driver.enter()
            wake_promptly()
            work(*arguments)

        self._thread = threading.Thread(target=run, name="seqmoe-dma", daemon=True)
        self._thread.start()


def wake_promptly() -> None:
    """Lets naps of the calling thread end on time; Linux gives others 50 us to be woken together."""
    set_timer_slack, nanoseconds = 29, 1_000
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # absent elsewhere: naps are longer there
    if prctl is not None:
        prctl(set_timer_slack, ctypes.c_ulong(nanoseconds))


def _calls_of(driver: CopyStream) -> Calls:
    """What the worker calls of the CUDA driver."""
    names = ("cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuEventQuery")
    copy, record, query = (address_of(getattr(driver.library, name)) for name in names)
    return Calls(copy=copy, record=record, query=query)
