"""Requests in, text out: the run of a batch, between token ids and the faces that users see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from seqmoe_jax.decode.loop import TokenEvent
from seqmoe_jax.decode.state import EXHAUSTED, STOPPED
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.errors import NonFiniteError
from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.text import Chat, TextStream, Tokenizer

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt as token ids, and what is to follow. `chat`: it is a conversation, whose reply is read as one."""

    tokens: list[int]
    max_new_tokens: int
    sampling: SamplingConfig
    stop: tuple[str, ...] = ()
    chat: Chat | None = None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Text that a new token of one sequence settled, maybe none; with its last one, why it ended."""

    sequence: int
    text: str
    reasoning: str
    finish_reason: FinishReason | None
    fault: NonFiniteError | None = None


class Run:
    """One generation: iterates over pieces, one per token; afterwards has `replies`, tokens (`new`), `reasons`, and the
    `faults` of sequences that ended with one, by their number."""

    def __init__(
        self, engine: TokenEngine, tokenizer: Tokenizer, eos_token_ids: Sequence[int], requests: Sequence[Request]
    ):
        self.replies = [
            TextStream(tokenizer=tokenizer, stop=request.stop, context=request.tokens)
            if request.chat is None
            else request.chat.reply(tokenizer, request.stop, request.tokens)
            for request in requests
        ]
        self.new: list[list[int]] = [[] for _ in requests]
        self.reasons: list[FinishReason] = ["length"] * len(requests)
        self.faults: dict[int, NonFiniteError] = {}
        self._open = set(range(len(requests)))
        self._events = engine.run(
            [request.tokens for request in requests],
            max_new_tokens=[request.max_new_tokens for request in requests],
            sampling=[request.sampling for request in requests],
            eos_token_ids=eos_token_ids,
        )

    def __iter__(self) -> Iterator[Piece]:
        try:
            for event in self._events:
                if event.sequence in self._open:
                    yield self._take(event)
                if not self._open:
                    return
        finally:
            self._events.close()

    def drop(self, sequence: int) -> None:
        """Nobody wants this sequence any more; the run ends when that is true of all."""
        self._open.discard(sequence)

    def _take(self, event: TokenEvent) -> Piece:
        index, reply = event.sequence, self.replies[event.sequence]
        thought = len(reply.reasoning)
        if not event.finite:
            self._open.discard(index)
            self.reasons[index], self.faults[index] = "error", _not_finite(index, len(self.new[index]))
            text, rest = reply.close(), reply.reasoning[thought:]
            return Piece(sequence=index, text=text, reasoning=rest, finish_reason="error", fault=self.faults[index])
        self.new[index].append(event.token)
        text = "" if event.end == STOPPED else reply.push(event.token)
        reason: FinishReason | None = None
        if event.end == STOPPED or reply.finished:
            reason = "stop"
        elif event.end == EXHAUSTED:
            reason = "length"
        if reason is not None:
            text += reply.close()
            # What was held back may have held a stop string after all.
            self.reasons[index] = reason = "stop" if reply.finished else reason
            self._open.discard(index)
        return Piece(sequence=index, text=text, reasoning=reply.reasoning[thought:], finish_reason=reason)


def _not_finite(sequence: int, new: int) -> NonFiniteError:
    return NonFiniteError(
        f"prompt {sequence}: expected finite logits for new token {new}, got NaN or infinity: the weights are "
        "damaged, or activations are beyond what their dtype holds; check the files, or load with dtype='float32'"
    )
