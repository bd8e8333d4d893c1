"""Text from tokens as they come: incremental decoding and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from seqmoe_jax.text.tokenizers import Tokenizer

_INCOMPLETE = "\ufffd"  # what decoding shows for the first bytes of a character whose rest is still to come
_CONTEXT = 8  # tokens decoded before the new ones, so that these come out as in the middle of a text


@dataclass(kw_only=True)
class TextStream:
    """Turns tokens of one sequence into text as they come, never showing half a character or part of a stop string.

    `context` are tokens before the first one, such as a prompt's: some tokenizers drop the space before a first word.
    `finished` is true once a stop string was found; `text` then ends just before it.
    """

    tokenizer: Tokenizer
    stop: tuple[str, ...] = ()
    text: str = ""
    context: Sequence[int] = ()
    finished: bool = False
    reasoning: str = ""  # what a reply holds besides its text; plain replies hold none
    _pending: list[int] = field(default_factory=list)  # tokens since `context`, not all of whose text is out
    _held: str = ""  # decoded, but may be the beginning of a stop string

    def __post_init__(self) -> None:
        self.context = self._before(list(self.context))

    def push(self, token: int) -> str:
        """The text that this token settles."""
        if self.finished:
            return ""
        self._pending.append(token)
        return self._settle(self._new_text(final=False), final=False)

    def close(self) -> str:
        """What is still held back when no more tokens come."""
        return "" if self.finished else self._settle(self._new_text(final=True), final=True)

    def _new_text(self, *, final: bool) -> str:
        before = self.tokenizer.decode(self.context)
        after = self.tokenizer.decode([*self.context, *self._pending])
        if after.endswith(_INCOMPLETE) and not final:
            return ""
        self.context, self._pending = self._before([*self.context, *self._pending]), []
        return after[len(before) :]

    def _before(self, tokens: list[int]) -> list[int]:
        """The last tokens, from a beginning of a character on: some tokenizers spell characters in bytes, one token
        each, and show none of a row of them that begins inside one."""
        ends = (tokens[-length:] for length in (_CONTEXT, 4 * _CONTEXT, 16 * _CONTEXT))
        return next((end for end in ends if _INCOMPLETE not in self.tokenizer.decode(end)), tokens[-_CONTEXT:])

    def _settle(self, new: str, *, final: bool) -> str:
        text = self._held + new
        found = [at for at in (text.find(stop) for stop in self.stop) if at >= 0]
        if found:
            self.finished, keep = True, min(found)
        else:
            keep = len(text) if final else len(text) - self._overlap(text)
        out, self._held = text[:keep], "" if self.finished else text[keep:]
        self.text += out
        return out

    def _overlap(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) for stop in self.stop), default=1) - 1
        return next(
            (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self.stop)), 0
        )
