"""Requests in, text out: between token ids and the faces that users see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from seqmoe_jax.decode.state import EXHAUSTED, STOPPED
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.errors import NonFiniteError
from seqmoe_jax.lanes import TokenEvent, TokenRequest
from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.text import Chat, TextStream, Tokenizer
from seqmoe_jax.text.harmony import Reply as HarmonyReply

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


@dataclass(kw_only=True)
class Answer:
    """What has come of a request so far: its text (`reply`), its new `tokens`, and once it has ended why."""

    reply: TextStream | HarmonyReply
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    fault: NonFiniteError | None = None


class Run:
    """Requests that are generated together: iterates over pieces, one per token, until all have ended.

    `poll` is called often meanwhile; there requests may be added and dropped. `answers` are by their numbers.
    """

    def __init__(
        self,
        engine: TokenEngine,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
        requests: Sequence[Request] = (),
        *,
        poll: Callable[[], None] | None = None,
    ):
        self._tokenizer, self._eos_token_ids = tokenizer, tuple(eos_token_ids)
        self.answers: dict[int, Answer] = {}
        if poll is None:  # nothing will be added
            engine.check([each.tokens for each in requests], [each.max_new_tokens for each in requests])
        self._session = engine.session(poll)
        for request in requests:
            self.add(request)

    @property
    def free(self) -> int:
        """Requests that may be added without one of them having to wait for another to end."""
        return self._session.free

    def add(self, request: Request) -> int:
        """Returns the number that its pieces have: 0, 1, ... Raises `PromptError` for what the engine cannot run."""
        number = self._session.add(
            TokenRequest(
                prompt=request.tokens,
                max_new_tokens=request.max_new_tokens,
                sampling=request.sampling,
                eos_token_ids=self._eos_token_ids,
            )
        )
        if request.chat is None:
            plain = TextStream(tokenizer=self._tokenizer, stop=request.stop, context=request.tokens)
            self.answers[number] = Answer(reply=plain)
        else:
            self.answers[number] = Answer(reply=request.chat.reply(self._tokenizer, request.stop, request.tokens))
        return number

    def drop(self, number: int) -> None:
        """Nobody wants this request any more: its answer ends with the text that it has."""
        self._session.drop(number)
        if (answer := self.answers.get(number)) is not None:
            answer.finish_reason = answer.finish_reason or "length"

    def __iter__(self) -> Iterator[Piece]:
        try:
            for event in self._session.events:
                answer = self.answers.get(event.sequence)
                if answer is None or answer.finish_reason is not None:
                    continue
                piece = _take(answer, event)
                if piece.finish_reason is not None:
                    self._session.drop(event.sequence)
                yield piece
        finally:
            self._session.events.close()


def _take(answer: Answer, event: TokenEvent) -> Piece:
    """The text that a token settles, and what it means for the answer."""
    reply, thought, number = answer.reply, len(answer.reply.reasoning), event.sequence
    if not event.finite:
        answer.finish_reason, answer.fault = "error", _not_finite(number, len(answer.tokens))
        text, rest = reply.close(), reply.reasoning[thought:]
        return Piece(sequence=number, text=text, reasoning=rest, finish_reason="error", fault=answer.fault)
    answer.tokens.append(event.token)
    text = "" if event.end == STOPPED else reply.push(event.token)
    if event.end == STOPPED or reply.finished:
        answer.finish_reason = "stop"
    elif event.end == EXHAUSTED:
        answer.finish_reason = "length"
    if answer.finish_reason is not None:
        text += reply.close()
        # What was held back may have held a stop string after all.
        answer.finish_reason = "stop" if reply.finished else answer.finish_reason
    return Piece(sequence=number, text=text, reasoning=reply.reasoning[thought:], finish_reason=answer.finish_reason)


def _not_finite(sequence: int, new: int) -> NonFiniteError:
    return NonFiniteError(
        f"prompt {sequence}: expected finite logits for new token {new}, got NaN or infinity: the weights are "
        "damaged, or activations are beyond what their dtype holds; check the files, or load with dtype='float32'"
    )
