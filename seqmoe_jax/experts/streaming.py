"""Sending experts ahead of the layers of a prompt (paper 8.4): which, in which order, and how.

In a long prompt nearly every expert of a layer is used, so what a layer misses is known well enough before its router
has run. Experts arrive in small groups of G in a staging area beside the slots, while earlier groups compute.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, Shaped

from pallas_kernels.layout import ExpertLayout
from seqmoe_jax.experts.engines.base import host_view

GROUP_BYTES = 64 << 20  # of a group: large enough to hide what the host does for it, small beside the slots
AHEAD = 2  # groups on their way while one computes
STAGED = AHEAD + 1  # groups in device memory at a time
LIKELY = 0.5  # an expert is sent if it is at least as likely to be used as not
PRIOR_TOKENS = 256.0  # tokens that what was known beforehand counts for


def group_size(layout: ExpertLayout, experts: int) -> int:
    """G: experts of a group."""
    return max(1, min(experts, GROUP_BYTES // layout.block_bytes))


def staging_bytes(layout: ExpertLayout, experts: int) -> int:
    """Device memory that streaming takes."""
    return STAGED * group_size(layout, experts) * layout.block_bytes


class Popularity:
    """How often a prompt's token uses each expert: a profile taken offline, corrected by the prompts that were read."""

    def __init__(self, layers: int, experts: int, active: int, profile: Float[np.ndarray, "L E"] | None = None):
        even = np.full((layers, experts), active / experts)
        self._uses = PRIOR_TOKENS * (even if profile is None else np.asarray(profile, np.float64))
        self._tokens = PRIOR_TOKENS

    def observe(self, tokens_of: Int[np.ndarray, "L E"], tokens: int) -> None:
        """Takes in a prompt of `tokens` tokens, of which `tokens_of` used each expert."""
        self._uses, self._tokens = self._uses + tokens_of, self._tokens + tokens

    def chance(self, tokens: int) -> Float[np.ndarray, "L E"]:
        """The probability that at least one of `tokens` tokens uses an expert, were they independent."""
        share = np.clip(self._uses / self._tokens, 0.0, 1.0)
        return 1.0 - (1.0 - share) ** tokens


@dataclass(frozen=True, kw_only=True)
class Group:
    """Up to G experts of one layer that are sent together."""

    layer: int
    experts: Int32[np.ndarray, " G"]  # -1 where there are fewer

    @property
    def count(self) -> int:
        return int((self.experts >= 0).sum())


def choose_groups(chance: Float[np.ndarray, "L E"], resident: Bool[np.ndarray, "L E"], size: int) -> list[list[Group]]:
    """For every layer, the groups of experts to send: those not resident and likely to be used, likeliest first."""
    chosen = []
    for layer, (likely, there) in enumerate(zip(chance, resident, strict=True)):
        order = np.argsort(-likely, kind="stable")
        wanted = order[(likely[order] >= LIKELY) & ~there[order]].astype(np.int32)
        parts = [wanted[start : start + size] for start in range(0, len(wanted), size)]
        chosen.append(
            [Group(layer=layer, experts=np.pad(part, (0, size - len(part)), constant_values=-1)) for part in parts]
        )
    return chosen


class Sender:
    """Sends groups through `jax.device_put`, which copies beside what the device computes. For every backend."""

    def __init__(self, pools: tuple[Shaped[Array, "E n"], ...], device: jax.Device):
        self._pools = pools  # the views below are of their memory
        self._rows = [host_view(pool) for pool in pools]
        self._device = device
        self._filler = jax.device_put(np.zeros(pools[0].shape[1], pools[0].dtype), device)

    def send(self, group: Group) -> Shaped[Array, "G n"]:
        """Begins to copy; what is returned may be given to programs at once."""
        rows = self._rows[group.layer]
        sent = jax.device_put([rows[expert] for expert in group.experts if expert >= 0], self._device)
        return _stack(*sent, *[self._filler] * (len(group.experts) - len(sent)))


class Arrivals:
    """The groups of a pass in the order in which they are needed, some of them on their way."""

    def __init__(self, sender: Sender, groups: list[list[Group]]):
        self._sender = sender
        self._waiting = deque(group for layer in groups for group in layer)
        self._under_way: deque[Shaped[Array, "G n"]] = deque()
        self._computing: deque[Array] = deque()
        for _ in range(AHEAD):
            self._send()

    def next(self) -> Shaped[Array, "G n"]:
        return self._under_way.popleft()

    def computed(self, done: Array) -> None:
        """The group taken last is done when the array `done` is there. Sends one more, when the group before that is:
        so memory is bounded, and the device always has a program to run and a group on its way."""
        self._computing.append(done)
        if len(self._computing) > 1:
            self._computing.popleft().block_until_ready()
        self._send()

    def _send(self) -> None:
        if self._waiting:
            self._under_way.append(self._sender.send(self._waiting.popleft()))


_stack = jax.jit(lambda *rows: jnp.stack(rows))
