"""Flax NNX models of other libraries as models of this one."""
