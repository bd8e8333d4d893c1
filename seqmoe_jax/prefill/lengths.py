"""How prompts are cut into passes and chunks, and for how many positions there is room.

Programs are compiled for every length that occurs, so all lengths here are rounded up to a few. A *chunk* goes through
a mixer at once; a *pass*, some chunks, goes through all experts of a layer at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

CHUNK = 1024  # most tokens (over all sequences) that pass a mixer at once: bounds its workspace
# Chunks that pass a layer before the next one begins: an expert moves once for all of them. The more the better, as far
# as their workspace fits (`memory.plan` chooses).
PASS_CHUNKS = (16, 8, 4)
SMALLEST_BUCKET = 16


class Chunk(NamedTuple):
    """`width` positions of every sequence from `start` on, counted from the beginning of its pass."""

    start: int
    width: int


class Pass(NamedTuple):
    """`length` positions of every sequence from `start` on, and the chunks that they go through mixers in.

    Of few lengths, so the last ones may lie behind all chunks: nothing is computed for these.
    """

    start: int
    length: int
    chunks: list[Chunk]


def bucket(length: int) -> int:
    """The padded length of a chunk: the next power of two."""
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())


def chunk_length(batch: int) -> int:
    """Longest chunk of each of `batch` sequences."""
    return max(SMALLEST_BUCKET, CHUNK // batch)


def passes_of(longest: int, batch: int, pass_chunks: int = PASS_CHUNKS[-1]) -> Iterator[Pass]:
    """The passes of `batch` prompts, the longest of which has `longest` tokens. Chunks are the same however many pass
    together."""
    chunk = chunk_length(batch)
    whole = chunk * pass_chunks
    for start in range(0, longest, whole):
        left = min(whole, longest - start)
        chunks = [Chunk(at, bucket(min(chunk, left - at))) for at in range(0, left, chunk)]
        count = 1 << (len(chunks) - 1).bit_length()
        yield Pass(start, chunks[0].width if count == 1 else count * chunk, chunks)


def kv_capacity(length: int) -> int:
    """Positions of KV allocated for a sequence of `length`."""
    if length <= 4096:
        return max(256, 1 << (length - 1).bit_length())
    return -(-length // 4096) * 4096


def capacity_of(prompts: Sequence[int], new: Sequence[int], batch: int) -> int:
    """Positions that a generation needs, from the lengths of its prompts and what may follow each.

    The padding of the last chunk of the longest prompt is included.
    """
    *_, last = passes_of(max(prompts), batch)
    padded_end = last.start + sum(last.chunks[-1])
    return kv_capacity(max(padded_end, *(length + more for length, more in zip(prompts, new, strict=True))))
