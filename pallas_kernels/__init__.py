"""Kernels of the offloaded step. One folder each: `reference` (plain XLA, the oracle), `gpu`, `tpu`, `api`."""
