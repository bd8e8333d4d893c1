"""Sequences that decode together: they join and leave between steps, and steps are dispatched ahead of the device.

Prompts that wait are read together, as many as there are lanes free; while they are read, the sequences that decode
already go on between layers. The number of lanes is the least power of two that holds the sequences: each is a program.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Int32

from seqmoe_jax.decode.lanes import end_lanes, pick_lanes, pick_sequences, put_lane
from seqmoe_jax.decode.state import NON_FINITE, RUNNING, Sequences, StepOutput
from seqmoe_jax.decode.step import StepConfig, jitted_step
from seqmoe_jax.models.mixers import State
from seqmoe_jax.offloading import Offloading
from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.prefill.lengths import lanes_for
from seqmoe_jax.prefill.programs import begin_decoding, first_token
from seqmoe_jax.prefill.reader import Lane, PromptReader
from seqmoe_jax.programs import Programs, shapes_of
from seqmoe_jax.sampling import SamplingParams
from seqmoe_jax.stats import Counts

RUN_AHEAD = 4  # steps dispatched before the oldest one's tokens are read; hides the host from the device
LONGEST_GAP_S = 0.05  # between two steps of sequences that decode while prompts are read, as far as layers allow
END_TOKENS = 8  # of a sequence; more take a program of their own


@dataclass(frozen=True, kw_only=True)
class TokenRequest:
    """One prompt as token ids, and what is to follow it."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: SamplingConfig
    eos_token_ids: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """One new token of one sequence. `end` is RUNNING, STOPPED (the token is an end token), EXHAUSTED or NON_FINITE
    (the token means nothing)."""

    sequence: int
    token: int
    end: int

    @property
    def finite(self) -> bool:
        """Whether the logits that the token comes from are finite numbers."""
        return self.end != NON_FINITE


@dataclass(eq=False, kw_only=True)
class _Sequence:
    """A request, from when it is asked for until its last token was read."""

    number: int
    request: TokenRequest
    left: int  # tokens that steps may still be dispatched for
    open: bool = True
    dropped: bool = False


class _Output(NamedTuple):
    """What was dispatched and is not read yet: a step, or the first tokens after prompts."""

    output: StepOutput
    lanes: list[_Sequence | None]
    counts: Counts
    is_step: bool


@dataclass(kw_only=True)
class _Batch:
    """Device state of the lanes. That of the predictor is in the state of the offloading."""

    layers: list[State]
    sequences: Sequences  # without their layers' states
    lanes: list[_Sequence | None]
    greedy: bool = True
    sampling: Any = None
    eos_token_ids: Any = None
    step: jax.stages.Compiled | None = None  # of so many lanes, once it was needed


@dataclass(kw_only=True)
class Lanes:
    """The sequences that one engine generates.

    step_configs: where all sequences are greedy (True), and where some draw.
    most: lanes that there may be; more sequences wait.
    poll: is called between steps, and between layers of prompts; it may `add` and `drop`.
    """

    offloading: Offloading
    reader: PromptReader
    programs: Programs
    step_configs: dict[bool, StepConfig]
    most: int
    poll: Callable[[], None] | None = None
    prefill: Counts = field(default_factory=Counts)
    decode: Counts = field(default_factory=Counts)
    prompt_tokens: int = 0  # of all that were asked for
    begun: int = 0  # sequences that have their first token

    def __post_init__(self) -> None:
        self._batch: _Batch | None = None
        self._waiting = deque[_Sequence]()
        self._known: dict[int, _Sequence] = {}
        self._pending = deque[_Output]()
        self._numbers = count()
        self._last_step = 0.0

    def add(self, request: TokenRequest) -> int:
        """A request that the engine can run; returns the number that its events have."""
        sequence = _Sequence(number=next(self._numbers), request=request, left=request.max_new_tokens - 1)
        self._known[sequence.number] = sequence
        self._waiting.append(sequence)
        self.prompt_tokens += len(request.prompt)
        return sequence.number

    def drop(self, number: int) -> None:
        """Nobody wants this sequence any more."""
        if (sequence := self._known.get(number)) is not None:
            sequence.dropped = True

    @property
    def running(self) -> int:
        """Sequences that decode."""
        return sum(lane is not None for lane in self._batch.lanes) if self._batch else 0

    @property
    def free(self) -> int:
        """Sequences that may be added without one of them having to wait for another to end."""
        return self.most - len(self._known)

    def events(self) -> Generator[TokenEvent, None, None]:
        """New tokens of all sequences, in the order of steps, until no sequence is left. Closing it ends them all;
        steps already dispatched still run."""
        try:
            while self._leave():
                if self._waiting and (free := self.most - self.running):
                    yield from self._read_prompts(
                        [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
                    )
                ahead = RUN_AHEAD if self.offloading.transfers is None else self.offloading.transfers.run_ahead
                while len(self._pending) < ahead and self._has_more():
                    self._dispatch()
                if self._pending:
                    yield from self._read(self._pending.popleft())
        finally:
            self._batch = None
            self._pending.clear()
            self.offloading.pause()

    def rehearse(self, read: Lane) -> None:
        """Goes through all that sequences may take when they join, decode and leave, where shapes stand for arrays (see
        `warm_up`). `read`: what reading leaves of a prompt."""
        greedy, drawn = (
            _Sequence(number=0, request=TokenRequest(prompt=[0], max_new_tokens=2, sampling=how), left=1)
            for how in (SamplingConfig(), SamplingConfig(temperature=1.0))
        )
        totals = self._put(np.zeros(3, np.int32))
        sizes = sorted({lanes_for(count) for count in range(1, self.most + 1)})
        for size in sizes:
            self._batch = None
            for each in [drawn] * min(2, size):  # the first begins a batch, the others join it
                self._begin(each, replace(read, layers=list(read.layers)), totals, size)
            batch = self._batch
            assert batch is not None
            self._end(batch, np.ones(size, bool))
            state, lanes = self.offloading.state, [drawn, *[None] * (size - 1)]
            for other in sizes:
                self._resize(replace(batch, layers=list(batch.layers), lanes=lanes), other)
                self.offloading.hold(state)
            for each in (greedy, drawn):
                self._step_program([each] * size)
        self._batch = None
        self._begin(greedy, replace(read, layers=list(read.layers)), totals, 1)

    def _leave(self) -> bool:
        """Lets go of sequences that have ended or that nobody wants. Returns whether any is left."""
        self._forget()
        self._poll()
        self._forget()
        if not self._known:
            return False
        if (batch := self._batch) is not None:
            gone = [lane if lane is not None and lane.number not in self._known else None for lane in batch.lanes]
            dropped = [lane is not None and lane.open for lane in gone]
            batch.lanes = [None if leaves else lane for leaves, lane in zip(gone, batch.lanes, strict=True)]
            if not self.running:
                self._batch = None
            elif not self._waiting and lanes_for(self.running) < len(batch.lanes):
                self._resize(batch, lanes_for(self.running))
            elif any(dropped):
                self._end(batch, np.array(dropped))
        return True

    def _end(self, batch: _Batch, dropped: Bool[np.ndarray, " B"]) -> None:
        """Sequences that nobody wants do not go on."""
        key, what = (len(dropped),), "the end of sequences"
        done = self._run(key, what, end_lanes, batch.sequences.done, self._put(dropped))
        batch.sequences = batch.sequences._replace(done=done)

    def _forget(self) -> None:
        for sequence in [each for each in self._known.values() if each.dropped or not each.open]:
            del self._known[sequence.number]
            if sequence in self._waiting:
                self._waiting.remove(sequence)

    def _poll(self) -> None:
        if self.poll is not None:
            self.poll()

    def _has_more(self) -> bool:
        """Whether a step may give anyone a token."""
        return self._batch is not None and any(
            lane is not None and lane.open and lane.left > 0 for lane in self._batch.lanes
        )

    def _read_prompts(self, sequences: list[_Sequence]) -> Iterator[TokenEvent]:
        """Reads prompts, then gives out their first tokens; meanwhile steps of those that decode already."""
        requests, offloading = [each.request for each in sequences], self.offloading
        others = [lane for lane in self._batch.lanes if lane is not None] if self._batch else []
        yield from self._drain()
        offloading.begin_prompts()
        step = self._step_program([*others, *sequences])
        reading = self.reader.read([r.prompt for r in requests], [r.max_new_tokens for r in requests], offloading)
        while True:
            try:
                next(reading)
            except StopIteration as stop:
                lanes, counts = stop.value
                break
            self._poll()
            if others:
                # The host's clock is the device's where nothing is dispatched far ahead.
                jax.block_until_ready(offloading.state.cache.tables)
                if time.perf_counter() - self._last_step > LONGEST_GAP_S and self._has_more():
                    self._dispatch()
                    yield from self._drain()
                    offloading.close_tasks()
        offloading.keep_most_used(counts.tokens_per_expert)
        self._join(sequences, lanes, counts.totals)
        if step is not None:
            step()  # before first tokens go out, so that text is not held up right after it began
        jax.block_until_ready(self._pending[-1].output.packed)
        offloading.resume()
        yield from self._drain()

    def _join(self, sequences: list[_Sequence], read: list[Lane], totals: Array) -> None:
        """The sequences whose prompts were read take lanes, and their first tokens are on their way."""
        size = lanes_for(self.running + len(sequences))
        if self._batch is not None and len(self._batch.lanes) < size:
            self._resize(self._batch, size)
        for sequence, lane in zip(sequences, read, strict=True):
            self._begin(sequence, lane, totals, size)
            totals = self._put(np.zeros(3, np.int32))
        assert self._batch is not None
        self._choices(self._batch)

    def _begin(self, sequence: _Sequence, read: Lane, totals: Array, size: int) -> None:
        """The first token of a sequence, which then takes a lane: one of those there are, or of `size` new ones."""
        request, offloading, reading = sequence.request, self.offloading, read.reading
        config, batch = self.step_configs[request.sampling.greedy], self._batch
        sampling, eos_ids = self._put((SamplingParams.of([request.sampling], 1), _end_tokens([request])))
        begun, end = self._run(
            (config.greedy, eos_ids.shape), "sampling", first_token, read.sequence, reading.last,
            self.reader.model.weights, sampling, eos_ids, config=config,
        )  # fmt: skip
        predictors = offloading.state.predictor
        state, output = self._run(
            (0 if batch is None else len(batch.lanes),), "the first forecast", begin_decoding,
            offloading.state._replace(predictor=reading.predictor), begun, end, reading.routing, totals,
            None if batch is None else batch.sequences.done, self.reader.predictor_weights, self.reader.replay,
            config=self.step_configs[True],
        )  # fmt: skip
        one, offload = (begun, state.predictor), state._replace(predictor=predictors)
        self._pending.append(_Output(output, [sequence], self.prefill, False))
        if batch is None:
            offloading.hold(state)
            self._batch = _Batch(layers=read.layers, sequences=begun, lanes=[sequence])
            if size > 1:
                self._resize(self._batch, size)
            return
        offloading.hold(offload)
        lane, among = batch.lanes.index(None), len(batch.lanes)
        batch.lanes[lane] = sequence
        at = self._put(np.int32(lane))
        both = self._run(
            ("sequences", among), "the join of sequences", put_lane, (batch.sequences, predictors), one, at
        )
        batch.sequences = both[0]
        offloading.update(predictor=both[1])
        for index, layer in enumerate(self.reader.model.spec.layers):
            key, states = (layer, among), (batch.layers[index], read.layers[index])
            batch.layers[index] = self._run(key, "the join of sequences", put_lane, *states, at)
            read.layers[index] = None

    def _resize(self, batch: _Batch, size: int) -> None:
        """As many lanes as `size`, the sequences in the first of them."""
        kept = [index for index, lane in enumerate(batch.lanes) if lane is not None]
        before, lanes = len(batch.lanes), [batch.lanes[index] for index in kept]
        index = self._put(np.array(kept + [-1] * (size - len(kept)), np.int32))
        state = self.offloading.state
        batch.sequences, predictor = self._run(
            (before, size), "other lanes", pick_sequences, batch.sequences, state.predictor, index
        )
        self.offloading.update(predictor=predictor)
        for number, layer in enumerate(self.reader.model.spec.layers):
            key = (layer, before, size)
            batch.layers[number] = self._run(key, "other lanes", pick_lanes, batch.layers[number], index)
        batch.lanes = lanes + [None] * (size - len(lanes))
        self._choices(batch)

    def _choices(self, batch: _Batch) -> None:
        """How the sequences in the lanes are sampled and ended."""
        requests = [None if lane is None else lane.request for lane in batch.lanes]
        configs = [SamplingConfig() if request is None else request.sampling for request in requests]
        batch.greedy = all(config.greedy for config in configs)
        params = SamplingParams.of(configs, len(configs)), _end_tokens(requests)
        batch.sampling, batch.eos_token_ids = self._put(params)
        batch.step = None

    def _step_program(self, sequences: Sequence[_Sequence]) -> Any:
        """Begins to make the decode step of these sequences; returns what waits for it, None where there will be none.
        It is made while prompts are read."""
        if not any(each.left for each in sequences):
            return None
        size, requests = lanes_for(len(sequences)), [each.request for each in sequences]
        greedy = all(request.sampling.greedy for request in requests)
        padded = [*requests, *[None] * (size - len(requests))]
        shapes, predictor = self.reader.shapes(size)
        sampling, eos_ids = self._put((SamplingParams.of([requests[0].sampling], size), _end_tokens(padded)))
        operands = self._operands(shapes, sampling, eos_ids)
        operands = (operands[0], operands[1]._replace(predictor=predictor), *operands[2:])
        what = (_step_key(size, greedy, eos_ids), "the decode step", jitted_step, *shapes_of(operands))
        self.programs.prepare(*what, config=self.step_configs[greedy])
        return partial(self.programs.get, *what, config=self.step_configs[greedy])

    def _operands(self, sequences: Sequences, sampling: Any, eos_token_ids: Any) -> tuple[Any, ...]:
        """The operands of a decode step, in its order."""
        offloading, reader = self.offloading, self.reader
        link = None if offloading.transfers is None else offloading.transfers.link()
        model = reader.model
        constant = model.weights, model.pools, sampling, eos_token_ids
        return sequences, offloading.state, *constant, link, reader.predictor_weights, reader.replay

    def _dispatch(self) -> None:
        """A step of all lanes."""
        batch = self._batch
        assert batch is not None
        sequences = batch.sequences._replace(states=tuple(batch.layers))
        operands = self._operands(sequences, batch.sampling, batch.eos_token_ids)
        if batch.step is None:
            key = _step_key(len(batch.lanes), batch.greedy, batch.eos_token_ids)
            config = self.step_configs[batch.greedy]
            batch.step = self.programs.get(key, "the decode step", jitted_step, *operands, config=config)
        sequences, state, output = batch.step(*operands)
        batch.sequences, batch.layers = sequences._replace(states=()), list(sequences.states)
        self.offloading.hold(state)
        self.offloading.check()
        output.packed.copy_to_host_async()
        self._pending.append(_Output(output, list(batch.lanes), self.decode, True))
        self._last_step = time.perf_counter()
        for lane in batch.lanes:
            if lane is not None:
                lane.left -= 1

    def _drain(self) -> Iterator[TokenEvent]:
        """The tokens of all that was dispatched."""
        while self._pending:
            yield from self._read(self._pending.popleft())

    def _read(self, pending: _Output) -> Iterator[TokenEvent]:
        """The new tokens of a step, when they have arrived; adds what it counted."""
        output, lanes, counts, is_step = pending
        if is_step and self.offloading.transfers is not None:
            self.offloading.transfers.deliver(output.tasks, output.clock)
        values = np.asarray(output.packed)
        counts.add(values[2 * len(lanes) :])
        for index, lane in enumerate(lanes):
            if lane is not None and lane.open:
                end = int(values[len(lanes) + index])
                lane.open = end == RUNNING
                self.begun += not is_step
                yield TokenEvent(sequence=lane.number, token=int(values[index]), end=end)

    def _run(self, key: tuple[Any, ...], what: str, function: Any, *args: Any, **static: Any) -> Any:
        return self.programs.get((function.__name__, *key), what, function, *args, **static)(*args)

    def _put(self, values: Any) -> Any:
        return jax.device_put(values, self.reader.device)


def _end_tokens(requests: Sequence[TokenRequest | None]) -> Int32[np.ndarray, "B N"]:
    """The end tokens of each, filled up with -1."""
    each = [[] if request is None else list(request.eos_token_ids) for request in requests]
    width = max(END_TOKENS, lanes_for(max(map(len, each)) or 1))
    return np.array([[*ids, *[-1] * (width - len(ids))] for ids in each], np.int32)


def _step_key(size: int, greedy: bool, eos_token_ids: Any) -> tuple[Any, ...]:
    return "step", size, greedy, eos_token_ids.shape[1]
