"""The tiny checkpoints are those of `tests/families`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "families"))

import jax
import pytest


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    """A family's tiny checkpoint, made when it is first asked for."""
    from checkpoints import make

    made = {}

    def base(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("base") / family
            make(family, made[family])
        return made[family]

    return base


@pytest.fixture(autouse=True)
def programs_are_given_back():
    """Each directory's logits take a program of their own, and a process can hold those of some 3,000."""
    yield
    jax.clear_caches()
