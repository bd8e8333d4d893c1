"""The slot cache of an engine, between the programs that donate it, and when experts may be moved into it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int32

from seqmoe_jax.decode.state import Offload, empty_offload
from seqmoe_jax.experts.cache import PINNED, CacheConfig, keep, rescore, settled
from seqmoe_jax.models.model import Model
from seqmoe_jax.options import Policy
from seqmoe_jax.prefetch.engine import TransferCounts, TransferEngine
from seqmoe_jax.programs import owned


class Offloading:
    """Holds the device state of the offloading: `state`, which programs donate and `hold` gets anew.

    It stays from one generation to the next: the cache stays warm.
    """

    def __init__(
        self,
        model: Model,
        config: CacheConfig,
        *,
        policy: Policy,
        reserve: int,
        device: jax.Device,
        transfers: TransferEngine | None,
    ):
        """`reserve`: slots that policies which fix experts leave to the others."""
        self.config, self.transfers = config, transfers
        self._policy, self._reserve, self._device = policy, reserve, device
        self._moving = False
        self.fill(model)

    def hold(self, state: Offload) -> None:
        """Called with every new value at once, so that an interrupt finds a valid one."""
        self.state = state

    def update(self, **changes: Any) -> None:
        """Replaces parts of the state, whose old values were donated."""
        self.hold(self.state._replace(**changes))

    def begin_prompts(self) -> None:
        """No task is open any more, and none will be until `resume`: prompts may need every slot."""
        if self.state.cache.blocks.is_deleted():
            # An interrupt fell between a program taking the cache and its result arriving here.
            self.fill(self._model)
        if self.transfers is not None:
            jax.block_until_ready(self.state.cache.tables)
            self.pause()
            self.close_tasks()

    def close_tasks(self) -> None:
        """After a step that planned transfers though nobody moves anything just now."""
        if self.transfers is not None:
            self.update(cache=_settled(self.state.cache))

    def warm_up(self) -> None:
        """Runs what is compiled when it is first needed, to no effect."""
        self.close_tasks()
        if self._policy == "prefill-hot":
            self._keep(np.zeros(self._model.spec.num_keys, bool))

    def resume(self) -> None:
        """What the steps plan from here on is moved."""
        if self.transfers is not None:
            self.transfers.start(self.state.cache.blocks)
            self._moving = True

    def check(self) -> None:
        """After a step was dispatched. Raises `RuntimeError` where the slot array has moved under running transfers."""
        if self.transfers is not None and self._moving:
            self.transfers.check(self.state.cache.blocks)

    def pause(self) -> None:
        """Returns when nothing is moved and nothing will be until `resume`."""
        if self.transfers is not None:
            self._moving = False
            self.transfers.pause()

    def transferred(self) -> TransferCounts:
        """What the transfer engine has done so far."""
        return self.transfers.counts() if self.transfers is not None else TransferCounts()

    def keep_most_used(self, tokens_per_expert: Int32[Array, "L E"]) -> None:
        """Policy prefill-hot: loads what the prompts used most and is not there yet, and fixes it."""
        keys, slots = self._model.spec.num_keys, self.config.slots
        if self._policy != "prefill-hot" or slots == keys:
            return
        wanted = np.zeros(keys, bool)
        wanted[np.argsort(-np.asarray(tokens_per_expert).reshape(-1), kind="stable")[: slots - self._reserve]] = True
        self._keep(wanted)

    def close(self) -> None:
        """Ends the transfer engine and gives the state back."""
        transfers, self.transfers = self.transfers, None
        state = vars(self).pop("state", None)
        if transfers is not None:
            with suppress(RuntimeError):  # steps under way read what it writes; some may have failed
                jax.block_until_ready(state)
            transfers.close()

    def fill(self, model: Model) -> None:
        """An empty cache for a model, or one that holds what its policy keeps from the start."""
        self._model = model
        keys, slots = self._model.spec.num_keys, self.config.slots
        self.hold(jax.device_put(_empty_offload(self.config), self._device))
        if slots == keys:
            self._keep(np.ones(keys, bool))
        elif self._policy == "full":
            self._keep(np.arange(keys) < slots - self._reserve)

    def _keep(self, wanted: np.ndarray) -> None:
        """Makes the wanted keys resident for good (policies that score keys) or at least now (lru, lfu)."""
        cache = self.state.cache
        if self.config.managed:
            # In NumPy: JAX would compile a program for each shape, and keep it.
            score = np.where(wanted, PINNED, -1).astype(np.int32)
            cache = _rescore(cache, np.stack([score, score]))
        for layer, pool in enumerate(self._model.pools):
            mask = wanted.reshape(self.config.layers, -1)[layer]
            cache = _keep(cache, pool, mask, np.int32(layer), config=self.config)
            self.update(cache=cache)


_empty_offload = owned(jax.jit(empty_offload, static_argnums=0))  # one program instead of one for each array
_rescore = owned(jax.jit(rescore, donate_argnums=0))
_keep = owned(jax.jit(keep, static_argnames="config", donate_argnums=0))
_settled = owned(jax.jit(settled, donate_argnums=0))
