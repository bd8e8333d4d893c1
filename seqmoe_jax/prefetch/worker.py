"""The worker: moves experts while the step runs, by Algorithm 1, in parts that a demand miss interrupts (paper 6, 8.3).

One loop compiled with numba, in a thread of its own and without the interpreter's lock. It reads what the step writes
into host memory (plans, and where the step is), copies parts of experts into reserved slots, and answers each task
with its tag. Answers are copied into device memory on the same stream, so a tag arrives behind the expert it tells of,
and the step's kernels read it without crossing the link. The worker owns a slot from the moment a plan lists it until
it has answered; whatever happens to it, the step only waits a bounded time and loads on demand.
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass
from typing import no_type_check

import numpy as np
from jaxtyping import Int64

from pallas_kernels.plan_tasks import CONFIDENCE_UNIT
from pallas_kernels.slot_update import PROGRESS_UNIT, UNDER_WAY
from seqmoe_jax.prefetch.compiled import address_of, call, compiled
from seqmoe_jax.prefetch.schedule import next_average, select_moe_infinity, select_promoe, select_seqmoe

SCHEDULERS = {"seqmoe": 0, "moe-infinity": 1, "promoe": 2}
PARTS_IN_FLIGHT = 2  # keeps the link busy while the end of a part is noticed; a miss waits for them


class Control(enum.IntEnum):
    """Words that the owner writes and the worker reads, and one that it answers in."""

    STOP = 0
    PAUSE = 1
    IDLE = 2  # the worker: nothing is under way, and nothing will be until PAUSE is lifted
    DROP_EVERY = 3  # these three: `engines.base.Faults`
    DELAY_NS = 4
    THROTTLE_NS = 5


class Count(enum.IntEnum):
    """What the worker counts."""

    LANDED = 0
    GIVEN_UP = 1  # started and not completed
    LATE = 2  # never started
    PLANS = 3
    BYTES = 4  # moved, whether they landed or not
    FAILED = 5  # status of the copy that failed, if one did
    DROPPED = 6  # arrived, but given up for a test


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Addresses of what the worker calls: a copy to the device and how to know that it is done."""

    copy: int  # (destination, source, bytes, stream) -> status, asynchronous
    record: int  # (event, stream) -> status
    query: int  # (event) -> 0 when everything before it is done

    def addresses(self) -> Int64[np.ndarray, " 5"]:
        """All that `work` calls, of the C library too: clock_gettime(clock, timespec) and usleep(us)."""
        libc = ctypes.CDLL(None)
        ours = [self.copy, self.record, self.query]
        return np.array([*ours, address_of(libc.clock_gettime), address_of(libc.usleep)], np.int64)


# Compiled code takes plain integers for constants.
STOP, PAUSE, IDLE, DROP_EVERY, DELAY, THROTTLE = (int(word) for word in Control)
LANDED, GIVEN_UP, LATE, PLANS, MOVED, FAILED, DROPPED = (int(word) for word in Count)


@compiled
@no_type_check
def read_plan(board, tasks, number, key, confidence, deadline, slot, tag):
    """The plan on the board, sorted by deadline; -1 where it is being written."""
    words = 5 * tasks + 1
    check = np.int32(number)
    for i in range(words):
        check = np.int32(check + board[1 + i])
    if check != board[1 + words] or board[0] != number:
        return -1
    n = 0
    for i in range(tasks):
        k = board[2 + i]
        if k < 0:
            continue
        c, d = board[2 + tasks + i] / CONFIDENCE_UNIT, board[2 + 2 * tasks + i]
        at = n
        while at > 0 and deadline[at - 1] > d:
            key[at], confidence[at], deadline[at] = key[at - 1], confidence[at - 1], deadline[at - 1]
            slot[at], tag[at] = slot[at - 1], tag[at - 1]
            at -= 1
        key[at], confidence[at], deadline[at] = k, c, d
        slot[at], tag[at] = board[2 + 3 * tasks + i], board[2 + 4 * tasks + i]
        n += 1
    return n


@compiled
@no_type_check
def answer(landed, slot, value, letters, post, functions, stream):
    """Notes what has become of a slot's task, and sends it to the device behind everything sent before."""
    landed[slot] = value
    letter = post[2] % letters.size
    letters[letter] = value
    post[2] += 1
    return call(functions[0], (post[0] + 4 * slot, post[1] + 4 * letter, np.int64(4), stream))


@compiled
@no_type_check
def work(
    board, progress, landed, letters, post, control, counts, rates, budget, pools, blocks, sizes, stream, events,
    scheduler, functions
):  # fmt: skip
    # sizes: tasks, experts, bytes of an expert, bytes of a part, layers. rates: ns of an expert, ns of a layer.
    # post: addresses of the device's `landed` and of the letters (pinned, answers are sent from them); answers sent.
    copy, record, query, clock_gettime, nap = functions[0], functions[1], functions[2], functions[3], functions[4]
    tasks, experts, whole, part, layers = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]
    key, deadline = np.empty(tasks, np.int64), np.empty(tasks, np.int64)
    slot, tag = np.empty(tasks, np.int64), np.empty(tasks, np.int64)
    confidence, saving, kept = np.empty(tasks), np.empty(tasks), np.empty(tasks, np.int64)
    timespec = np.zeros(2, np.int64)
    part_size, part_order = np.zeros(2, np.int64), 0
    n, last_plan, last_progress, clock = 0, np.int32(0), np.int32(-1), np.int64(-1)
    f_key, f_slot, f_tag, f_deadline = np.int64(-1), np.int64(-1), np.int64(0), np.int64(0)
    sent, done, flying, stalled, told = np.int64(0), np.int64(0), 0, False, False
    began, quiet_until, layer_began, not_before, arrived = 0, 0, 0, 0, np.int64(0)
    missed = False
    while control[STOP] == 0:
        call(clock_gettime, (1, timespec.ctypes.data))
        now = timespec[0] * 1_000_000_000 + timespec[1]

        while flying > 0 and call(query, (events[part_order % 2],)) == 0:
            done += part_size[part_order % 2]
            counts[MOVED] += part_size[part_order % 2]
            part_order += 1
            flying -= 1

        if control[PAUSE] != 0:
            if flying == 0:
                if f_tag > 0:
                    answer(landed, f_slot, -f_tag, letters, post, functions, stream)
                    counts[GIVEN_UP] += 1
                    f_tag = 0
                n, last_plan = 0, board[0]
                control[IDLE] = 1
            call(nap, (20,))
            continue
        control[IDLE] = 0

        word = progress[0]
        if word != last_progress:
            position, misses = np.int64(word // PROGRESS_UNIT), word % PROGRESS_UNIT
            if position != clock:
                if position == clock + 1 and not missed:
                    rates[1] += 0.05 * (min(now - layer_began, 4 * rates[1]) - rates[1])
                for _ in range(min(position - clock, layers)):
                    budget[0] = next_average(budget[0], budget[1], 0.1, n == 0)
                    budget[1] = budget[0]
                clock, layer_began, missed = position, now, False
                quiet_until = 0
            if misses > 0:
                # The device is loading these itself: leave it the link.
                missed = True
                quiet_until = now + np.int64(0.95 * misses * rates[0])
            last_progress = word

        number = board[0]
        if number != last_plan:
            read = read_plan(board, tasks, number, key, confidence, deadline, slot, tag)
            if read >= 0:
                n, last_plan = read, number
                counts[PLANS] += 1

        if f_tag > 0:
            if done == whole:
                if arrived == 0:
                    arrived = now
                    if not stalled:
                        rates[0] += 0.1 * (min(now - began, 2 * rates[0]) - rates[0])
                if now - arrived >= control[DELAY]:
                    order = counts[LANDED] + counts[DROPPED] + 1
                    drop = not told and control[DROP_EVERY] > 0 and order % control[DROP_EVERY] == 0
                    counts[DROPPED if drop else LANDED] += 1
                    if not told:
                        answer(landed, f_slot, -f_tag if drop else f_tag, letters, post, functions, stream)
                    f_tag = 0
            elif clock > f_deadline and not told:
                # Its layer has run without it. What is in flight must end before the slot is given back.
                if flying == 0:
                    answer(landed, f_slot, -f_tag, letters, post, functions, stream)
                    counts[GIVEN_UP] += 1
                    f_tag = 0
            elif now < quiet_until:
                stalled = True
            elif flying < PARTS_IN_FLIGHT and sent < whole and now >= not_before:
                size = min(part, whole - sent)
                source = pools[f_key // experts] + (f_key % experts) * whole + sent
                status = call(copy, (blocks + f_slot * whole + sent, source, size, stream))
                event = (part_order + flying) % 2
                if status == 0:
                    status = call(record, (events[event], stream))
                if status != 0:
                    counts[FAILED] = status
                    return
                part_size[event] = size
                sent += size
                flying += 1
                if sent == whole and control[DELAY] == 0 and control[DROP_EVERY] == 0:
                    answer(landed, f_slot, f_tag, letters, post, functions, stream)
                    told = True
                not_before = now + control[THROTTLE]

        if f_tag == 0 and n > 0:
            # Answer what cannot be in time any more, or is not wanted; forget what has been answered.
            m = 0
            for i in range(n):
                if abs(landed[slot[i]]) == tag[i]:
                    continue
                if deadline[i] <= clock or confidence[i] <= 0:
                    answer(landed, slot[i], -tag[i], letters, post, functions, stream)
                    counts[LATE] += 1
                    continue
                key[m], confidence[m], deadline[m] = key[i], confidence[i], deadline[i]
                slot[m], tag[m] = slot[i], tag[i]
                m += 1
            n = m
            if n > 0 and now >= quiet_until:
                cost = rates[0] / rates[1]
                for i in range(n):
                    saving[i] = confidence[i] * min(1.0, (deadline[i] - clock) / cost)
                if scheduler == 0:
                    at = select_seqmoe(saving, deadline, n, clock, clock, budget[1], budget[0], kept)
                elif scheduler == 1:
                    at = select_moe_infinity(confidence, deadline, n, clock, clock, layers)
                else:
                    at = select_promoe(confidence, deadline, n, clock)
                if at >= 0:
                    f_key, f_slot, f_tag, f_deadline = key[at], slot[at], tag[at], deadline[at]
                    answer(landed, f_slot, f_tag + UNDER_WAY, letters, post, functions, stream)
                    sent, done, flying, stalled, told = np.int64(0), np.int64(0), 0, False, False
                    arrived, began = np.int64(0), now
                    budget[1] -= 1
                    continue
        if f_tag == 0 or now < quiet_until:
            call(nap, (2,))  # else it polls, or the link would run dry between two parts
