"""Prefetch through JAX alone: a thread puts experts into device memory, the next step copies them into their slots.

The portable engine. A plan reaches it when the step that made it has ended, and what it moves lands at the start of a
step, so it works on plans for the step after next. Plans come from the steps' outputs, read late, or through a host
callback from inside the step (`channels`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from pallas_kernels.plan_tasks import CONFIDENCE, CONFIDENCE_UNIT, DEADLINE, KEY, SLOT, TAG
from seqmoe_jax.prefetch.channels import close_channel, open_channel
from seqmoe_jax.prefetch.engine import EngineConfig, Faults, Moved, host_view
from seqmoe_jax.prefetch.link import Arrivals, Link
from seqmoe_jax.prefetch.schedule import Budget, select_task
from seqmoe_jax.prefetch.tasks import Tasks

log = logging.getLogger("seqmoe_jax")

STAGED = 4  # experts that one step takes in; the answers of one step are as many again
REMEMBERED = 4096  # tags of answered tasks


class DevicePut:
    """`callback`: plans arrive through a channel, otherwise `tell` brings them."""

    ahead = 2
    run_ahead = 2

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
        self._pools = pools  # the views below are of their memory
        self._rows = [host_view(pool) for pool in pools]
        self._nothing = jax.device_put(jnp.zeros(pools[0].shape[1], pools[0].dtype), device)
        self._rho = jax.device_put(np.float32(1.0), device)
        self._arrived: deque[tuple[int, int, Array | None]] = deque()  # slot, tag or -tag, block
        self._plans: deque[tuple[np.ndarray, int]] = deque(maxlen=4)
        self._answered: dict[int, None] = {}
        self._condition = threading.Condition()
        self._running, self._busy, self._closed = False, False, False
        self._moved = Moved()
        self._fault: str | None = None
        self._faults, self._killed, self._last_begun = Faults(), False, 0.0
        self.channel = open_channel(self.enqueue) if callback else None
        self._thread = threading.Thread(target=self._work, name=f"seqmoe-{self.name}", daemon=True)
        self._thread.start()

    def link(self) -> Link:
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
        for index, (where, answer, _) in enumerate(taken):
            slot[index], tag[index] = where, answer
        blocks += [self._nothing] * (STAGED - len(blocks))
        slots, tags = jax.device_put((slot, tag), self._device)
        return Link(transfer_layers=self._rho, arrivals=Arrivals(tuple(blocks), slots, tags))

    def tell(self, tasks: Any, clock: Any) -> None:
        if self.name == "device_put":
            self.enqueue(np.asarray(tasks), int(clock))

    def enqueue(self, tasks: np.ndarray, clock: int) -> None:
        """The plan [5, N] of a step that ended at position `clock`."""
        with self._condition:
            self._plans.append((tasks, clock))
            self._condition.notify_all()

    def start(self, blocks: Shaped[Array, "rows n"]) -> None:
        with self._condition:
            self._plans.clear()
            self._arrived.clear()
            self._running = True

    def check(self, blocks: Shaped[Array, "rows n"]) -> None:
        pass  # writes nothing behind XLA's back

    def pause(self) -> None:
        with self._condition:
            self._running = False
            self._plans.clear()
            self._condition.wait_for(lambda: not self._busy or self._closed, timeout=10)
            self._arrived.clear()

    def moved(self) -> Moved:
        return replace(self._moved)

    def fault(self) -> str | None:
        fault, self._fault = self._fault, None
        return fault

    def inject(self, faults: Faults) -> None:
        self._faults = faults

    def kill(self) -> None:
        with self._condition:
            self._killed = True
            self._condition.notify_all()

    def close(self) -> None:
        if self.channel is not None:
            close_channel(self.channel)
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join(timeout=5)

    def _work(self) -> None:
        try:
            self._transfer_until_closed()
        except Exception as error:  # the step loads on demand what does not come
            self._fault = f"the {self.name} worker stopped: {error!r}"
            log.warning(self._fault)
            with self._condition:
                self._busy, self._closed = False, True

    def _transfer_until_closed(self) -> None:
        layers = self.config.plan.layers
        budget, clock, moved = Budget(average=1.0, current=1.0), 0, 0
        open_: Tasks | None = None
        while True:
            with self._condition:
                self._busy = False
                self._condition.notify_all()
                idle = open_ is None or not len(open_)
                if idle or not self._running:
                    self._condition.wait_for(
                        lambda: self._closed or self._killed or (self._running and bool(self._plans))
                    )
                if self._killed:
                    raise RuntimeError("killed")
                if self._closed:
                    return
                if not self._running:
                    open_ = None
                    continue
                plan, clock_now = self._plans[-1] if self._plans else (None, clock)
                self._plans.clear()
                self._busy = True
            if plan is not None:
                if clock_now > clock:
                    average = budget.average + 0.1 * (moved / layers - budget.average)
                    budget, moved = Budget(average=max(average, 1e-3), current=max(average, 1e-3)), 0
                clock, open_ = clock_now, self._open_tasks(plan)
            assert open_ is not None
            chosen = select_task(
                open_, position=clock, budget=budget, scheduler=self.config.scheduler, layers=layers, lead=0  # type: ignore[arg-type]
            )  # fmt: skip
            if chosen is None:
                open_ = None
                continue
            if self._transfer(int(open_.key[chosen]), int(open_.slot[chosen]), int(open_.tag[chosen])):
                moved, budget = moved + 1, budget.after_transfer()
            open_ = _without(open_, chosen)

    def _open_tasks(self, plan: np.ndarray) -> Tasks:
        """The tasks still to be answered; those that are not wanted any more are answered here."""
        keep = []
        for index in range(plan.shape[1]):
            tag = int(plan[TAG, index])
            if plan[KEY, index] < 0 or tag in self._answered:
                continue
            if plan[CONFIDENCE, index] > 0:
                keep.append(index)
            else:
                self._answer(int(plan[SLOT, index]), -tag, None)
                self._moved.late += 1
        rows = plan[:, keep].astype(np.int64)
        return Tasks(
            key=rows[KEY], confidence=rows[CONFIDENCE] / CONFIDENCE_UNIT, deadline=rows[DEADLINE],
            slot=rows[SLOT], tag=rows[TAG],
        )  # fmt: skip

    def _transfer(self, key: int, slot: int, tag: int) -> bool:
        experts, faults = self.config.plan.experts, self._faults
        if faults.throttle_s:
            time.sleep(max(0.0, self._last_begun + faults.throttle_s - time.perf_counter()))
            self._last_begun = time.perf_counter()
        block = jax.device_put(self._rows[key // experts][key % experts], self._device)
        block.block_until_ready()
        if faults.delay_s:
            time.sleep(faults.delay_s)
        self._moved.bytes += block.nbytes
        if faults.drop_every and (self._moved.landed + self._moved.dropped + 1) % faults.drop_every == 0:
            self._moved.dropped += 1
            self._answer(slot, -tag, None)
            return False
        self._moved.landed += 1
        self._answer(slot, tag, block)
        return True

    def _answer(self, slot: int, answer: int, block: Array | None) -> None:
        self._answered[abs(answer)] = None
        while len(self._answered) > REMEMBERED:
            del self._answered[next(iter(self._answered))]
        with self._condition:
            if self._running:
                self._arrived.append((slot, answer, block))


def _without(tasks: Tasks, index: int) -> Tasks:
    names = ("key", "confidence", "deadline", "slot", "tag")
    return Tasks(**{name: np.delete(getattr(tasks, name), index) for name in names})
