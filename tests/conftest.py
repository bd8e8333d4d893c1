"""Shapes and dtypes in annotations are checked at run time in every test; equal programs are compiled once."""

import jax
import pytest
from jaxtyping import install_import_hook

install_import_hook(["seqmoe_jax", "pallas_kernels"], "beartype.beartype")


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
