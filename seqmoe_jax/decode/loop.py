"""The host's side of decoding: steps are dispatched ahead of the device, and their outputs read in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from seqmoe_jax.decode.state import NON_FINITE, RUNNING, StepOutput
from seqmoe_jax.stats import Counts


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


class Lanes:
    """The sequences of a batch as far as their tokens have been read. `batch` lanes, of which `count` are in use."""

    def __init__(self, count: int, batch: int):
        self._open, self._batch = [True] * count, batch
        self.tokens = 0  # read so far

    @property
    def running(self) -> bool:
        """Whether any sequence goes on."""
        return any(self._open)

    def read(self, output: StepOutput, counts: Counts) -> Iterator[TokenEvent]:
        """The new tokens of a step, when they have arrived; adds what it counted to `counts`."""
        values = np.asarray(output.packed)
        counts.add(values[2 * self._batch :])
        for index, is_open in enumerate(self._open):
            if is_open:
                end = int(values[self._batch + index])
                self._open[index] = end == RUNNING
                self.tokens += 1
                yield TokenEvent(sequence=index, token=int(values[index]), end=end)


def run_ahead(
    dispatch: Callable[[], StepOutput], *, steps: int, ahead: int, wanted: Callable[[], bool]
) -> Iterator[StepOutput]:
    """The outputs of up to `steps` steps in their order, `ahead` of them dispatched before the first is given out; ends
    early when nothing more is `wanted`. Steps dispatched by then still run."""
    pending = deque[StepOutput]()
    dispatched = 0
    while wanted() and (pending or dispatched < steps):
        while len(pending) < ahead and dispatched < steps:
            pending.append(dispatch())
            dispatched += 1
        yield pending.popleft()
