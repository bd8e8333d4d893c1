"""How much of anything a server takes on."""

from __future__ import annotations

from dataclasses import dataclass

# Characters of the longest tokens that vocabularies have (runs of spaces): a text of more for each token of the context
# is longer than the context.
CHARACTERS_PER_TOKEN = 128


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server takes on. More is refused with a status, before it costs anything.

    body: bytes of a body, at most (413). A small context lowers that: see `body_for`.
    large: bytes from which a body counts as large.
    large_at_once: large bodies that are read at once; further ones wait.
    readers: bodies that are parsed and tokenized at once; further ones wait.
    values: numbers, texts, lists and objects in a body, at most (400).
    pause: seconds without a byte of a request that has begun, at most (408).
    body_time: seconds that a whole body may take (408).
    linger: seconds for which the rest of a body is read after an early answer, so that its client sees that answer.
    prompts: prompts in one request, at most (400).
    waiting: requests that wait in the queue, at most (503).
    stops: stop strings of a request, at most (400).
    stop_length: characters of each stop string, at most (400).
    """

    body: int = 16 << 20
    large: int = 1 << 20
    large_at_once: int = 4
    readers: int = 2
    values: int = 1_000_000
    pause: float = 10.0
    body_time: float = 60.0
    linger: float = 10.0
    prompts: int = 1024
    waiting: int = 64
    stops: int = 4
    stop_length: int = 256

    def body_for(self, context: int) -> int:
        """Bytes of a body, at most, where prompts have at most `context` tokens: the longest tokens in UTF-8, or some
        sixty prompts of token ids."""
        return min(self.body, (64 << 10) + 4 * CHARACTERS_PER_TOKEN * context)
