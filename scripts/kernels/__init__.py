"""Benches of the kernels, one module per group: `moe`, `decode`, `cache`; what they share is in `harness`."""
