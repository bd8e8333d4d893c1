"""docs/architecture.md names what there is: every room of both packages, and no file that is not there."""

import re
from pathlib import Path

import pytest

TREE = Path(__file__).parents[1]
TEXT = (TREE / "docs" / "architecture.md").read_text()
JOURNEYS = re.findall(r"^### (.*)\n((?:.*\n)*?)(?=^###|\Z)", TEXT, re.MULTILINE)


def drawn():
    """The paths of the tree that the page draws; two spaces are one level."""
    (block,) = re.findall(r"```\n((?:.*\n)*?)```", TEXT)
    parents: list[str] = []
    for line in block.splitlines():
        level = (len(line) - len(line.lstrip())) // 2
        parents = [*parents[:level], line.split()[0].rstrip("/")]
        yield "/".join(parents)


def test_every_room_is_drawn():
    rooms = {
        str(file.parent.relative_to(TREE))
        for package in ("seqmoe_jax", "pallas_kernels")
        for file in (TREE / package).rglob("__init__.py")
    }
    modules = {f"seqmoe_jax/{file.name}" for file in (TREE / "seqmoe_jax").glob("[!_]*.py")}
    assert rooms | modules <= set(drawn())


def test_what_is_drawn_is_there():
    assert [path for path in drawn() if not (TREE / path).exists()] == []


@pytest.mark.parametrize(("name", "journey"), JOURNEYS, ids=[name for name, _ in JOURNEYS])
def test_a_journey_visits_files_that_are_there_and_each_once(name, journey):
    steps = re.findall(r"^(\d+)\. `([^`]+\.py)`(?:, `(\w+)(?:\.(\w+))?`)?", journey, re.MULTILINE)
    assert [int(number) for number, *_ in steps] == list(range(1, len(steps) + 1))
    assert len(steps) == len(re.findall(r"^\d+\.", journey, re.MULTILINE)) > 5
    assert len({path for _, path, *_ in steps}) == len(steps)
    for _, path, *names in steps:
        source = (TREE / path).read_text()
        for said in filter(None, names):
            assert re.search(rf"^\s*(def|class) {said}\b", source, re.MULTILINE), (path, said)


def test_paths_that_other_pages_name_are_there():
    pages = [TREE / "README.md", TREE / "CONTRIBUTING.md"]
    named = {path for page in pages for path in re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", page.read_text())}
    assert [path for path in sorted(named) if not (TREE / path).exists()] == []
