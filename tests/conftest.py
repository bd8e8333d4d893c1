"""Shapes and dtypes in annotations are checked at run time in every test; programs are compiled quickly, and once."""

import gc
import os
from functools import partialmethod
from importlib.metadata import version

import jax
import jaxtyping
import pytest
from jax.stages import Lowered
from jaxtyping import install_import_hook

# Nearly all of the suite's time goes into compiling programs that then run for milliseconds: LLVM need not optimise
# them. Code from fusion emitters takes longer to compile than the older kind, which later versions have no more.
USUAL = {"xla_backend_optimization_level": 3}
QUICK = {"xla_backend_optimization_level": 0}
if version("jaxlib").startswith("0.10."):
    USUAL["xla_cpu_use_fusion_emitters"] = True
    QUICK["xla_cpu_use_fusion_emitters"] = False
flags = [f"--{name}={str(value).lower()}" for name, value in QUICK.items()]
os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")])  # read when first compiling

install_import_hook(["seqmoe_jax", "pallas_kernels"], "beartype.beartype")


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    # Of each process: JAX does not write entries at once, and another process might read a half.
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture(scope="module", autouse=True)
def programs_are_let_go():
    """Each holds a dozen memory mappings, of which Linux allows a process 65,530; the next file may read them back."""
    yield
    gc.collect()
    jax.clear_caches()


@pytest.fixture(scope="module")
def compiled_as_usual():
    """Engines compile as they do outside the tests: for claims about the compiled program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lowered, "compile", partialmethod(Lowered.compile, compiler_options=USUAL))
        yield


@pytest.fixture
def no_type_checks():
    """As for a caller outside the tests, where a wrong type reaches the function."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
