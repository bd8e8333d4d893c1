"""Shapes and dtypes in annotations are checked at run time in every test."""

from jaxtyping import install_import_hook

install_import_hook(["seqmoe_jax", "pallas_kernels"], "beartype.beartype")
