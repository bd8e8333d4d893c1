"""The contract of imports in pyproject.toml holds for the tree, and is broken by imports that go the wrong way."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter")

TREE = Path(__file__).parents[1]
PACKAGES = ("seqmoe_jax", "pallas_kernels")


def lint(tree):
    """Exit status and report of `lint-imports` about the packages in a directory."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_the_tree_keeps_the_contract():
    status, report = lint(TREE)
    assert status == 0, report


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The code alone, in another place."""
    directory = tmp_path_factory.mktemp("tree")
    shutil.copy(TREE / "pyproject.toml", directory)
    for source in (file for package in PACKAGES for file in (TREE / package).rglob("*.py")):
        target = directory / source.relative_to(TREE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    return directory


@pytest.mark.parametrize(
    ("file", "imported"),
    [
        ("pallas_kernels/layout.py", "seqmoe_jax.errors"),
        ("seqmoe_jax/models/spec.py", "seqmoe_jax.checkpoints.resolve"),
        ("seqmoe_jax/decode/__init__.py", "seqmoe_jax.engine"),
        ("seqmoe_jax/serving/query.py", "seqmoe_jax.cli.main"),
        ("seqmoe_jax/traces/format.py", "seqmoe_jax.forecast.config"),
        ("seqmoe_jax/forecast/store.py", "seqmoe_jax.traces.format"),
        ("seqmoe_jax/simulation/settings.py", "seqmoe_jax.forecast.store"),
        ("seqmoe_jax/options.py", "jax"),
    ],
)
def test_an_import_in_the_wrong_direction_breaks_it(copy, file, imported):
    path, before = copy / file, (copy / file).read_text()
    path.write_text(f"{before}\nimport {imported}\n")
    status, report = lint(copy)
    path.write_text(before)
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert status == 1
    assert f"{module} -> {imported} (" in report


def test_a_room_that_the_contract_does_not_place_breaks_it(copy):
    (copy / "seqmoe_jax" / "new_room.py").write_text("")
    status, report = lint(copy)
    (copy / "seqmoe_jax" / "new_room.py").unlink()
    assert status == 1
    assert "- seqmoe_jax.new_room" in report
