"""Mixers: how positions of a sequence see each other. One file per kind, one interface."""

from seqmoe_jax.models.mixers.base import Mixer as Mixer
from seqmoe_jax.models.mixers.base import State as State

__all__ = ["Mixer", "State"]
