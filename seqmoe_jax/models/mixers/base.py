"""The interface of mixers. B sequences, T positions of each, H hidden."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.backend import Implementation
from seqmoe_jax.models.tensors import Take, Tensors

State = Any  # a pytree of arrays with B in front: what the mixer keeps of the sequences' past
Weights = Any  # a pytree of arrays: what the mixer assembles from its tensors


@runtime_checkable
class Mixer(Protocol):
    """A frozen description of one kind of mixer that can also compute it. Hashable: a static argument of programs."""

    def tensors(self, hidden: int) -> Tensors:
        """Its tensors by canonical name, as checkpoints hold them."""

    def assemble(self, take: Take) -> Weights:
        """Its weights, from the tensors by canonical name."""

    def init_state(self, batch: int, capacity: int, dtype: np.dtype) -> State:
        """Room for `capacity` positions of `batch` sequences, with nothing in it. Traceable."""

    def apply(
        self,
        x: Float[Array, "B T H"],
        state: State,
        positions: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
        weights: Weights,
        implementation: Implementation = "xla",
    ) -> tuple[Float[Array, "B T H"], State]:
        """Mixes T new positions of every sequence into its past: T = 1 in decoding, a chunk of a prompt in prefill.

        Positions of a row are consecutive and below the capacity. Rows are padded at the end where `valid` is false:
        what padding gives is not read, and it must leave no trace in what later positions see. `implementation` says
        which kernels a chunk may use; a mixer without any ignores it.
        """

    def unfit_chunks(self) -> str | None:
        """Why chunks of prompts are computed by plain XLA where there are kernels, if so."""

    def workspace_bytes(self, batch: int, length: int, capacity: int) -> int:
        """Upper estimate of the temporaries of a chunk of `length` positions per sequence."""
