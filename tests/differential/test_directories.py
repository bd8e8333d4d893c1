"""What a directory says is what runs: variants of every family's tiny checkpoint, read as transformers reads them.

python -m pytest -n 0 -s -m slow tests/differential     # all of them, with a table
"""

from __future__ import annotations

from random import Random

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import variants_config
import variants_weights
from checkpoints import FAMILIES
from directories import DIFFERENT, counted, sampled
from readings import compare, theirs

# Those whose tokens are generated anew; of the others, whose weights are those of the base, each token is compared.
GENERATED = ("dtype", "head", "names", "shards")


def variants(family, base):
    yield from variants_config.variants(family, base)
    yield from variants_weights.variants(family, base)


def verdicts(chosen, base):
    tokens, _ = theirs(base)
    return [compare(variant, base, None if variant.axis in GENERATED else tokens) for variant in chosen]


@pytest.mark.parametrize("family", Random(0).sample(sorted(FAMILIES), 3))
def test_a_sample_of_directories_is_equal_or_refused(bases, family):
    base = bases(family)
    found = verdicts(sampled(variants(family, base), 6), base)
    assert [verdict for verdict in found if verdict.kind == DIFFERENT] == []


@pytest.mark.slow  # hundreds of directories
@pytest.mark.parametrize("family", FAMILIES)
def test_every_directory_is_equal_or_refused(bases, family):
    base = bases(family)
    found = verdicts(variants(family, base), base)
    print(f"\n{family}: {len(found)} directories;", ", ".join(counted(found)))
    assert [verdict for verdict in found if verdict.kind == DIFFERENT] == []
