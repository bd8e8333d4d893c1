"""Trains the small Qwen3-MoE that ships inside the package as `seqmoe_jax/demo`."""
