"""A real trace for the tests: an excerpt of published gpt-oss-20b activations (tests/data/README.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from seqmoe_jax.traces.format import Trace, read_trace

EXCERPT = Path(__file__).parents[1] / "data" / "gptoss20b_excerpt.npz"


@pytest.fixture(scope="session")
def excerpt() -> Trace:
    return read_trace(EXCERPT)
