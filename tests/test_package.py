"""What `import seqmoe_jax` gives: every public name, none of the cost, and types."""

import inspect
import subprocess
import sys
from pathlib import Path

import pallas_kernels
import seqmoe_jax
from seqmoe_jax import errors


def test_every_name_is_there_and_so_is_every_error():
    assert all(getattr(seqmoe_jax, name).__name__.split(".")[-1] == name for name in seqmoe_jax.__all__)
    assert dir(seqmoe_jax) == sorted(seqmoe_jax.__all__)
    assert {name for name, _ in inspect.getmembers(errors, inspect.isclass)} <= set(seqmoe_jax.__all__)


def test_importing_it_imports_nothing_else():
    code = "import sys, seqmoe_jax; sys.exit(any(name.startswith('seqmoe_jax.') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_both_packages_are_typed():
    for package in (seqmoe_jax, pallas_kernels):
        assert (Path(package.__file__).parent / "py.typed").is_file()
