"""Prefetch through JAX alone: a thread puts experts into device memory, the next step copies them into their slots.

The portable engine. A plan reaches it when the step that made it has ended, and what it moves lands at the start of a
step, so it works on plans for the step after next. Plans come from the steps' outputs, read late, or through a host
callback from inside the step (`channels`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.plan_tasks import CONFIDENCE_UNIT
from seqmoe_jax.host_memory import host_view
from seqmoe_jax.prefetch.channels import close_channel, open_channel
from seqmoe_jax.prefetch.engine import EngineConfig, TransferCounts
from seqmoe_jax.prefetch.link import Arrivals, StagedLink
from seqmoe_jax.prefetch.schedule import ALPHA, SCHEDULERS, choose, next_average
from seqmoe_jax.prefetch.tasks import TASK, add, remove

log = logging.getLogger("seqmoe_jax")

STAGED = 4  # experts that one step takes in; the tags of one step are as many again
REMEMBERED = 4096  # tags of acknowledged tasks
COST = 1.0  # RHO is not measured


class DevicePut:
    """`callback`: plans arrive through a channel, otherwise `deliver` brings them.

    `put` moves an expert to the device. It may be exchanged, for a function that behaves worse.
    """

    ahead = 2
    run_ahead = 2
    transfer_cost = None

    def __init__(
        self,
        pools: tuple[Shaped[Array, "E n"], ...],
        device: jax.Device,
        config: EngineConfig,
        *,
        callback: bool = False,
    ):
        self.name = "callback" if callback else "device_put"
        self.config, self._device = config, device
        self.put: Callable[[np.ndarray], Array] = lambda expert: jax.device_put(expert, device).block_until_ready()
        self._experts = [host_view(pool) for pool in pools]
        self._nothing = jax.device_put(np.zeros(pools[0].shape[1], pools[0].dtype), device)
        self._rho = jax.device_put(np.float32(COST), device)
        self._arrived: deque[tuple[int, int, Array | None]] = deque()  # slot, tag or -tag, block
        self._plans: deque[tuple[Int32[np.ndarray, "5 N"], int]] = deque(maxlen=4)
        self._acknowledged: dict[int, None] = {}
        self._condition = threading.Condition()
        self._running, self._busy, self._closed = False, False, False
        self._counts = TransferCounts()
        self._fault: str | None = None
        # Of the worker: what is left of the plan, Algorithm 1's budget, and transfers since the plan came.
        self._tasks, self._size = np.zeros(config.plan.tasks, TASK).view(np.recarray), 0
        self._clock, self._average, self._moved = 0, 1.0, 0
        self.channel = open_channel(self.enqueue) if callback else None
        self._thread = threading.Thread(target=self._work, name=f"seqmoe-{self.name}", daemon=True)
        self._thread.start()

    def link(self) -> StagedLink:
        taken: list[tuple[int, int, Array | None]] = []
        blocks: list[Array] = []
        with self._condition:
            while self._arrived and len(taken) < 2 * STAGED:
                block = self._arrived[0][2]
                if block is not None and len(blocks) == STAGED:
                    break
                taken.append(self._arrived.popleft())
                if block is not None:
                    blocks.append(block)
        # Arrivals with a block first: the step pairs the i-th block with the i-th slot.
        taken.sort(key=lambda arrival: arrival[2] is None)
        slot, tag = np.full(2 * STAGED, -1, np.int32), np.zeros(2 * STAGED, np.int32)
        for index, arrival in enumerate(taken):
            slot[index], tag[index], _ = arrival
        blocks += [self._nothing] * (STAGED - len(blocks))
        slots, tags = jax.device_put((slot, tag), self._device)
        return StagedLink(transfer_cost=self._rho, arrivals=Arrivals(tuple(blocks), slots, tags))

    def deliver(self, tasks: Any, clock: Any) -> None:
        if self.channel is None:
            self.enqueue(np.asarray(tasks), int(clock))

    def enqueue(self, tasks: Int32[np.ndarray, "5 N"], clock: int) -> None:
        """The plan of a step that ended at position `clock`."""
        with self._condition:
            self._plans.append((tasks, clock))
            self._condition.notify_all()

    def start(self, blocks: Shaped[Array, "S n"]) -> None:
        with self._condition:
            self._plans.clear()
            self._arrived.clear()
            self._running = True

    def check(self, blocks: Shaped[Array, "S n"]) -> None:
        pass  # writes nothing behind XLA's back

    def pause(self) -> None:
        with self._condition:
            self._running = False
            self._plans.clear()
            self._condition.wait_for(lambda: not self._busy or self._closed, timeout=10)
            self._arrived.clear()

    def counts(self) -> TransferCounts:
        return replace(self._counts)

    def fault(self) -> str | None:
        fault, self._fault = self._fault, None
        return fault

    def close(self) -> None:
        if self.channel is not None:
            close_channel(self.channel)
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._thread is not threading.current_thread():  # where the last reference to an engine may end
            self._thread.join(timeout=5)

    def _work(self) -> None:
        try:
            while self._wait_for_tasks():
                self._transfer_next()
        except Exception as error:  # the step loads on demand what does not come
            self._fault = f"the {self.name} worker stopped: {error!r}"
            log.warning(self._fault)
            with self._condition:
                self._busy, self._closed = False, True

    def _wait_for_tasks(self) -> bool:
        """Returns when there may be something to transfer, of the latest plan; with False when the engine is closed."""
        with self._condition:
            self._busy = False
            self._condition.notify_all()
            if not self._running:
                self._size = 0
            self._condition.wait_for(lambda: self._closed or (self._running and (self._plans or self._size)))
            if self._closed:
                return False
            latest = self._plans[-1] if self._plans else None
            self._plans.clear()
            self._busy = True
        if latest is not None:
            self._take(*latest)
        return True

    def _take(self, plan: Int32[np.ndarray, "5 N"], clock: int) -> None:
        """The tasks that are not acknowledged yet; those that are not wanted any more are acknowledged here."""
        layers = self.config.plan.layers
        if clock > self._clock:
            self._average = next_average(self._average, self._average - self._moved / layers, ALPHA, False)
            self._moved = 0
        self._clock, self._size = clock, 0
        for key, confidence, deadline, slot, tag in plan.T.tolist():
            if key < 0 or tag in self._acknowledged:
                continue
            if confidence > 0:
                confidence /= CONFIDENCE_UNIT
                self._size = add(self._tasks, self._size, key, confidence, deadline, slot, tag)
            else:
                self._acknowledge(slot, -tag, None)
                self._counts.late += 1

    def _transfer_next(self) -> None:
        config = self.config
        at = choose(
            SCHEDULERS[config.scheduler], self._tasks, self._size, self._clock, COST, self._average,
            self._average - self._moved, config.plan.layers,
        )  # fmt: skip
        if at < 0:
            self._size = 0
            return
        task = self._tasks[at]
        layer, expert = divmod(task.key, config.plan.experts)
        block = self.put(self._experts[layer][expert])
        self._counts.bytes += block.nbytes
        self._counts.landed += 1
        self._moved += 1
        self._acknowledge(int(task.slot), int(task.tag), block)
        self._size = remove(self._tasks, self._size, at)

    def _acknowledge(self, slot: int, tag: int, block: Array | None) -> None:
        self._acknowledged[abs(tag)] = None
        while len(self._acknowledged) > REMEMBERED:
            del self._acknowledged[next(iter(self._acknowledged))]
        with self._condition:
            if self._running:
                self._arrived.append((slot, tag, block))
