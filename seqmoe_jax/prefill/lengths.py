"""How prompts are cut into passes and chunks, and for how many positions there is room.

Programs are compiled for every length that occurs, so all lengths here are rounded up to a few. A *chunk* of one
sequence goes through a mixer at once; a *pass*, some chunks of some sequences, goes through all experts of a layer at
once. A sequence is cut at its own positions, and its chunks are computed by themselves, so that what comes of them
depends neither on other sequences nor on the passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

CHUNK = 1024  # most tokens that pass a mixer at once: bounds its workspace
# Chunks that pass a layer before the next one begins: an expert moves once for all of them. The more the better, as far
# as their workspace fits (`memory.plan` chooses).
PASS_CHUNKS = (16, 8, 4)
SMALLEST_BUCKET = 16


class Chunk(NamedTuple):
    """`width` positions of a sequence from `start` on; they lie at `at` in their pass. Some of the last chunk of a
    sequence are padding."""

    sequence: int
    start: int
    width: int
    at: int


class Pass(NamedTuple):
    """Chunks that go through the experts together, and the `length` that they are padded to."""

    length: int
    chunks: list[Chunk]


def bucket(length: int) -> int:
    """The padded length of a chunk or a pass: the next power of four, so that there are few."""
    return max(SMALLEST_BUCKET, 4 ** -(-(length - 1).bit_length() // 2))


def passes_of(lengths: Sequence[int], pass_chunks: int = PASS_CHUNKS[-1]) -> Iterator[Pass]:
    """The passes of prompts of these lengths, of at most `pass_chunks` whole chunks each."""
    chunks = list[Chunk]()
    end = 0
    for sequence, length in enumerate(lengths):
        for start in range(0, length, CHUNK):
            width = min(CHUNK, bucket(length - start))
            if end + width > CHUNK * pass_chunks:
                yield Pass(bucket(end), chunks)
                chunks, end = [], 0
            chunks.append(Chunk(sequence, start, width, end))
            end += width
    yield Pass(bucket(end), chunks)


def sizes_of(capacity: int, prompts: int, pass_chunks: int) -> tuple[list[int], list[int]]:
    """All widths of chunks and all lengths of passes that can come of so many prompts within a capacity each."""
    widths = sorted({bucket(length) for length in range(1, min(CHUNK, capacity) + 1)})
    longest = bucket(min(CHUNK * pass_chunks, prompts * capacity))
    return widths, sorted({bucket(length) for length in range(1, longest + 1)})


def lanes_for(sequences: int) -> int:
    """Sequences that a batch has room for: a power of two, so that few sizes are compiled."""
    return 1 << (sequences - 1).bit_length()


def kv_capacity(length: int) -> int:
    """Positions of KV allocated for a sequence of `length`."""
    if length <= 4096:
        return max(256, 1 << (length - 1).bit_length())
    return -(-length // 4096) * 4096


def capacity_of(prompts: Sequence[int], new: Sequence[int]) -> int:
    """Positions that a generation needs, from the lengths of its prompts and what may follow each.

    The padding of each prompt's last chunk is included.
    """
    padded = (chunk.start + chunk.width for each in passes_of(prompts) for chunk in each.chunks)
    return kv_capacity(max(*padded, *(length + more for length, more in zip(prompts, new, strict=True))))
