"""The slot cache as state of an NNX model: one pool of slots that all its MoE blocks share."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32

from seqmoe_jax.errors import EngineError
from seqmoe_jax.experts.cache import HITS, MISSES, ROUTED, CacheConfig, SlotCache, empty_cache


class Slots(NamedTuple):
    """The cache, and what it did: distinct experts routed, found resident, loaded. Floats, which do not overflow."""

    cache: SlotCache
    counts: Float32[Array, " 3"]


class SlotState(nnx.Variable[Any]):
    """The `Slots` of a model. Every program that changes them must have been given them to keep (donated): a copy of
    all slots would cost more than the experts it saves.

    Where a new value comes and the old one is still there, the next program that is given the model raises
    `EngineError`. Not at once: Flax is then in the middle of putting the model together.
    """

    __slots__ = ("_copied",)

    def update_from_state(self, variable_state: nnx.Variable[Any]) -> None:
        before = self.get_raw_value()
        super().update_from_state(variable_state)
        self._note(before)

    def set_raw_value(self, value: Any, *, _unsafe_bypass_check: bool = False) -> None:
        before = self.get_raw_value()
        super().set_raw_value(value, _unsafe_bypass_check=_unsafe_bypass_check)
        self._note(before)

    def get_metadata(self, *args: Any, **options: Any) -> Any:
        """Asked for whenever the model is taken apart to be given to a program."""
        self._refuse()
        return super().get_metadata(*args, **options)

    def _refuse(self) -> None:
        """Raises where the last program has copied the slots, once."""
        copied = getattr(self, "_copied", None)
        if copied is not None:
            object.__setattr__(self, "_copied", None)
            raise EngineError(
                "expected a program that takes the expert slots over (donates the model it is given), got one that "
                f"copied all {copied.shape[0]} of them ({copied.size * copied.dtype.itemsize / 1e6:.1f} MB), which it "
                "would do in every call; write nnx.jit(step, donate_argnums=0), with the number of the model among "
                "the arguments"
            )

    def _note(self, before: Any) -> None:
        """Whether the slots that were here before have been copied."""
        after = self.get_raw_value()
        if not isinstance(before, Slots) or not isinstance(after, Slots):  # what a transformation puts there
            return
        old, new = before.cache.blocks, after.cache.blocks
        traced = isinstance(old, jax.core.Tracer) or isinstance(new, jax.core.Tracer)
        if not traced and old is not new and not old.is_deleted():
            self._refuse()  # of a program that holds the model (nnx.cached_partial), which takes nothing apart
            object.__setattr__(self, "_copied", jax.ShapeDtypeStruct(old.shape, old.dtype))


class HostExperts(nnx.Variable[Any]):
    """All experts of one layer in pinned host memory, `storage[E, n]`. Programs read it and hand it on."""


class ExpertSlots(nnx.Module):
    """What the MoE blocks of a model share: S slots on the device for the experts of all of them.

    `hit_rate`, `counts`: of all calls so far. They wait for the device.
    """

    def __init__(self, config: CacheConfig, device: jax.Device):
        self.config = config
        self.state = SlotState(jax.device_put(Slots(cache=_empty(config), counts=jnp.zeros(3, jnp.float32)), device))

    @property
    def residency(self) -> float:
        """S over the number of experts."""
        return self.config.slots / (self.config.layers * self.config.experts)

    @property
    def counts(self) -> dict[str, int]:
        """Distinct experts of a layer that calls were routed to, those found in a slot, and those loaded."""
        counts = np.asarray(self.state.get_value().counts)
        return {"routed": int(counts[ROUTED]), "hits": int(counts[HITS]), "loaded": int(counts[MISSES])}

    @property
    def hit_rate(self) -> float:
        counts = self.counts
        return counts["hits"] / counts["routed"] if counts["routed"] else 1.0


def _empty(config: CacheConfig) -> SlotCache:
    made: SlotCache = jax.jit(empty_cache, static_argnums=0)(config)
    return made
