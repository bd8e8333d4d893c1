"""The worker: moves experts while the step runs, by Algorithm 1, in parts that a demand miss interrupts (paper 6, 8.3).

One loop compiled with numba, in a thread of its own and without the interpreter's lock. It reads what the step writes
into host memory (plans, and where the step is), copies parts of experts into reserved slots, and acknowledges each task
by its tag. Tags are copied into device memory on the same stream, so a tag arrives behind its expert, and the step's
kernels read it without crossing the link. The worker owns a slot from the moment a plan lists it until it has
acknowledged the task; whatever happens to it, the step only waits a bounded time and loads on demand.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np

from pallas_kernels.plan_tasks import CHECK, CONFIDENCE, CONFIDENCE_UNIT, DEADLINE, FIRST_TASK, KEY, NUMBER, SLOT, TAG
from pallas_kernels.slot_update import PROGRESS_UNIT, UNDER_WAY
from seqmoe_jax.prefetch.compiled import call, compiled, inlined, int32_at, int64_at
from seqmoe_jax.prefetch.schedule import ALPHA, choose, next_average
from seqmoe_jax.prefetch.state import OUTBOX
from seqmoe_jax.prefetch.tasks import add

PARTS_IN_FLIGHT = 2  # keeps the link busy while the end of a part is noticed; a miss waits for them
TAG_BYTES = 4
CLOCK_MONOTONIC = 1


@compiled
@no_type_check
def work(setup, shared, step, transfer, tasks):
    """Until `shared.stop` is set or a copy fails."""
    board, progress = int32_at(setup.board), int32_at(setup.progress)
    while shared.stop == 0:
        now = nanoseconds(setup)
        note_parts(setup, shared, transfer)
        if shared.pause != 0:
            rest(setup, shared, step, transfer)
            continue
        shared.idle = 0
        if progress[0] != step.word:
            follow_step(setup, shared, step, progress[0], now)
        if board[NUMBER] != step.plan:
            read_board(setup, shared, step, tasks)
        if transfer.tag > 0:
            status = advance(setup, shared, step, transfer, now)
            if status != 0:
                shared.failed = status
                return
        if transfer.tag == 0 and step.tasks > 0:
            prune(setup, shared, step, tasks)
            if now >= step.quiet_until and begin_next(setup, shared, step, transfer, tasks, now):
                continue
        if transfer.tag == 0 or now < step.quiet_until:
            call(setup.usleep, (2,))  # else it polls, or the link would run dry between two parts


@inlined
@no_type_check
def nanoseconds(setup):
    call(setup.clock_gettime, (CLOCK_MONOTONIC, setup.timespec))
    timespec = int64_at(setup.timespec)
    return timespec[0] * 1_000_000_000 + timespec[1]


@inlined
@no_type_check
def event_of(setup, part):
    return setup.odd_event if part % 2 else setup.even_event


@inlined
@no_type_check
def note_parts(setup, shared, transfer):
    """Notes which parts have arrived."""
    while transfer.parts_done < transfer.parts_sent:
        if call(setup.event_query, (event_of(setup, transfer.parts_done),)) != 0:
            break
        shared.bytes += min(setup.part_bytes, setup.expert_bytes - transfer.parts_done * setup.part_bytes)
        transfer.parts_done += 1


@inlined
@no_type_check
def rest(setup, shared, step, transfer):
    """Gives up the transfer and forgets the plan, once no part is in flight any more."""
    if transfer.parts_done == transfer.parts_sent:
        if transfer.tag > 0:
            give_up(setup, shared, transfer)
        step.tasks, step.plan = 0, int32_at(setup.board)[NUMBER]
        shared.idle = 1
    call(setup.usleep, (20,))


@inlined
@no_type_check
def follow_step(setup, shared, step, word, now):
    """Where the step is: the budget and the time of a layer follow from it, and a miss has the link for itself."""
    position, misses = np.int64(word // PROGRESS_UNIT), word % PROGRESS_UNIT
    if position != step.position:
        if position == step.position + 1 and step.missed == 0:
            shared.layer_ns += 0.05 * (min(now - step.layer_began, 4 * shared.layer_ns) - shared.layer_ns)
        for _ in range(min(position - step.position, setup.layers)):
            shared.average = next_average(shared.average, shared.current, ALPHA, step.tasks == 0)
            shared.current = shared.average
        step.position, step.layer_began, step.missed, step.quiet_until = position, now, 0, 0
    if misses > 0:
        # The device is loading these itself: leave it the link.
        step.missed = 1
        step.quiet_until = now + np.int64(0.95 * misses * shared.transfer_ns)
    step.word = word


@inlined
@no_type_check
def read_board(setup, shared, step, tasks):
    """Takes a new plan in the place of the one before; not while it is being written."""
    board, room, total = int32_at(setup.board), setup.room, np.int32(0)
    number = board[NUMBER]
    for i in range(FIRST_TASK + 5 * room):
        if i != CHECK:
            total = np.int32(total + board[i])
    if total != board[CHECK] or board[NUMBER] != number:
        return
    size = 0
    for i in range(FIRST_TASK, FIRST_TASK + room):
        if board[i + KEY * room] >= 0:
            confidence = board[i + CONFIDENCE * room] / CONFIDENCE_UNIT
            deadline, slot, tag = board[i + DEADLINE * room], board[i + SLOT * room], board[i + TAG * room]
            size = add(tasks, size, board[i + KEY * room], confidence, deadline, slot, tag)
    step.tasks, step.plan = size, number
    shared.plans += 1


@inlined
@no_type_check
def advance(setup, shared, step, transfer, now):
    """Completes the transfer, gives it up, waits, or sends its next part. Returns the status of what it called."""
    complete, in_flight = transfer.sent == setup.expert_bytes, transfer.parts_sent - transfer.parts_done
    if complete and in_flight == 0:
        if transfer.stalled == 0:
            shared.transfer_ns += 0.1 * (min(now - transfer.began, 2 * shared.transfer_ns) - shared.transfer_ns)
        shared.landed += 1
        transfer.tag = 0
    elif step.position > transfer.deadline and not complete:
        # Its layer has run without it. What is in flight must end before the slot is given back.
        if in_flight == 0:
            give_up(setup, shared, transfer)
    elif now < step.quiet_until:
        transfer.stalled = 1
    elif in_flight < PARTS_IN_FLIGHT and not complete:
        return send_part(setup, shared, transfer)
    return 0


@inlined
@no_type_check
def send_part(setup, shared, transfer):
    """The next part; behind the last one the tag."""
    size = min(setup.part_bytes, setup.expert_bytes - transfer.sent)
    status = call(setup.memcpy, (transfer.target + transfer.sent, transfer.source + transfer.sent, size, setup.stream))
    if status == 0:
        status = call(setup.event_record, (event_of(setup, transfer.parts_sent), setup.stream))
    if status != 0:
        return status
    transfer.sent += size
    transfer.parts_sent += 1
    if transfer.sent == setup.expert_bytes:
        acknowledge(setup, shared, transfer.slot, transfer.tag)
    return 0


@inlined
@no_type_check
def give_up(setup, shared, transfer):
    acknowledge(setup, shared, transfer.slot, -transfer.tag)
    shared.given_up += 1
    transfer.tag = 0


@inlined
@no_type_check
def prune(setup, shared, step, tasks):
    """Gives up what cannot be in time any more, or is not wanted; forgets what has been acknowledged."""
    left = 0
    for i in range(step.tasks):
        task = tasks[i]
        if abs(int32_at(setup.tags)[task.slot]) == task.tag:
            continue
        if task.deadline <= step.position or task.confidence <= 0:
            acknowledge(setup, shared, task.slot, -task.tag)
            shared.late += 1
            continue
        tasks[left] = task
        left += 1
    step.tasks = left


@inlined
@no_type_check
def begin_next(setup, shared, step, transfer, tasks, now):
    """Whether there is a next transfer; its tag is announced as under way."""
    cost = shared.transfer_ns / shared.layer_ns
    at = choose(setup.scheduler, tasks, step.tasks, step.position, cost, shared.average, shared.current, setup.layers)
    if at < 0:
        return False
    task = tasks[at]
    transfer.slot, transfer.tag, transfer.deadline = task.slot, task.tag, task.deadline
    layer, expert = task.key // setup.experts, task.key % setup.experts
    transfer.source = int64_at(setup.pools)[layer] + expert * setup.expert_bytes
    transfer.target = setup.blocks + task.slot * setup.expert_bytes
    transfer.sent, transfer.parts_sent, transfer.parts_done = 0, 0, 0
    transfer.began, transfer.stalled = now, 0
    acknowledge(setup, shared, transfer.slot, transfer.tag + UNDER_WAY)
    shared.current -= 1
    return True


@inlined
@no_type_check
def acknowledge(setup, shared, slot, value):
    """Sends a slot's tag to the device, behind everything sent before: negative where the task is given up."""
    place = shared.tags_sent % OUTBOX
    int32_at(setup.tags)[slot] = int32_at(setup.outbox)[place] = value
    shared.tags_sent += 1
    target, source = shared.device_tags + TAG_BYTES * slot, setup.outbox + TAG_BYTES * place
    call(setup.memcpy, (target, source, np.int64(TAG_BYTES), setup.stream))
