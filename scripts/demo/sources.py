"""The training sources: which domain each belongs to and how often it is read.

`rate` is the relative number of passes over a source: 2.0 is read twice as often per token as 1.0. Large sources of
one kind (PEPs, books, the standard library) are read less often so that they do not drown the small ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """One `<name>.jsonl.xz` of the corpus."""

    name: str
    domain: str
    rate: float


SOURCES = (
    Source("gsm8k", "math", 1.6),
    Source("gsm8k_model_solutions", "math", 1.0),
    Source("math_test", "math", 1.0),
    Source("tora_outputs", "math", 1.2),
    Source("svamp", "math", 1.2),
    Source("aqua_dev_test", "math", 1.0),
    Source("humaneval", "python", 1.5),
    Source("mbpp", "python", 1.6),
    Source("thealgorithms_python", "python", 1.6),
    Source("leetcode_solutions", "python", 1.2),
    Source("cpython_stdlib", "python", 0.8),
    Source("thealgorithms_java", "other code", 1.0),
    Source("thealgorithms_cpp", "other code", 1.0),
    Source("atcoder_library", "other code", 1.0),
    Source("exercism", "other code", 0.9),
    Source("rust_book", "technical prose", 1.2),
    Source("peps", "technical prose", 0.5),
    Source("python_docs", "technical prose", 0.7),
    Source("jargon_file", "definitions", 1.5),
    Source("standard_ebooks", "stories", 1.0),
    Source("tinyshakespeare", "stories", 1.2),
    Source("us_presidential_speeches", "speeches", 0.9),
    Source("taskmaster", "dialogue", 1.5),
)


@dataclass(frozen=True)
class Attribution:
    """One row of the corpus README's table."""

    name: str
    source: str
    licence: str
    documents: str
    bytes_of_text: str


def read_attributions(readme: Path) -> dict[str, Attribution]:
    """The table of the corpus README by source name."""
    rows = {}
    for line in readme.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 6 and re.fullmatch(r"[\d,]+", cells[4]):
            name, _, source, licence, documents, size = cells
            rows[name] = Attribution(name, source, licence, documents, size)
    return rows
