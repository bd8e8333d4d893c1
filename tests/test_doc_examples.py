"""The Python of the docs runs, block after block of a page, as it stands there."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"(?:<!-- needs (\w+) -->\n)?```python\n(.*?)```", re.DOTALL)


def test_the_example_for_zoos_is_short():
    (_, block), *_ = BLOCK.findall((DOCS / "zoo.md").read_text())
    assert len(block.splitlines()) < 60


@pytest.mark.slow
@pytest.mark.parametrize("page", ["zoo", "python"])
def test_a_page_runs(page, no_type_checks):
    names = {}
    for needed, block in BLOCK.findall((DOCS / f"{page}.md").read_text()):
        if needed:
            pytest.importorskip(needed)
        exec(compile(block, f"docs/{page}.md", "exec"), names)
