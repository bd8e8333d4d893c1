"""`python -m seqmoe_jax.cli`."""

from seqmoe_jax.cli.main import run_process

run_process()
