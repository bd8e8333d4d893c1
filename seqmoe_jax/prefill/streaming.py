"""Sending experts ahead of the layers of a prompt (paper 8.4): which, in which order, and how.

In a long prompt nearly every expert of a layer is used, so what a layer misses is known well enough before its router
has run. Experts arrive in small groups of G in a staging area beside the slots, while earlier groups compute.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, Shaped

from pallas_kernels.layout import ExpertLayout
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.host_memory import host_view
from seqmoe_jax.prefetch.cuda import CopyStream

log = logging.getLogger("seqmoe_jax")

GROUP_BYTES = 48 << 20  # of a group: large enough to hide what the host does for it, small beside the slots
AHEAD = 4  # groups on their way while one computes: the link goes on while a layer mixes and routes
STAGED = AHEAD + 1  # groups in device memory at a time
LIKELY = 0.8  # least probability of being used of an expert that is sent
# The tokens of a text resemble each other: T of them use as many experts as T ** RESEMBLANCE independent ones would.
# Measured on text of gpt-oss-20b, from 4 to 256 tokens: .63 to .78. Of what is sent for 8 or more, 82 to 92 % is used.
RESEMBLANCE = 0.7
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
        """The probability that at least one of `tokens` tokens of a text uses an expert."""
        share = np.clip(self._uses / self._tokens, 0.0, 1.0)
        return 1.0 - (1.0 - share) ** (tokens**RESEMBLANCE)


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


@runtime_checkable
class Sender(Protocol):
    """Moves groups from the pools to the device. Not for several threads at once."""

    name: str

    def send(self, group: Group) -> Any:
        """Begins to copy. At most `STAGED` groups are sent and not yet computed with."""
        ...

    def receive(self, sent: Any) -> Shaped[Array, "G n"]:
        """What `send` returned, as an array that programs may be given now; rows without an expert hold anything."""
        ...

    def close(self) -> None: ...


class DevicePutSender:
    """Through `jax.device_put`, which copies beside what the device computes. For every backend."""

    name = "device_put"

    def __init__(self, pools: tuple[Shaped[Array, "E n"], ...], device: jax.Device):
        self._pools = pools  # the views below are of their memory
        self._rows = [host_view(pool) for pool in pools]
        self._device = device
        self._filler = jax.device_put(np.zeros(pools[0].shape[1], pools[0].dtype), device)

    def send(self, group: Group) -> Shaped[Array, "G n"]:
        rows = self._rows[group.layer]
        sent = jax.device_put([rows[expert] for expert in group.experts[: group.count]], self._device)
        return _stack(*sent, *[self._filler] * (len(group.experts) - group.count))

    def receive(self, sent: Shaped[Array, "G n"]) -> Shaped[Array, "G n"]:
        return sent

    def close(self) -> None:
        pass


class CopySender:
    """Straight into a staging area that is written behind XLA's back, on a stream of its own (CUDA).

    Nobody computes with a part of the area while it is written: `Arrivals` sends the next group when the one that was
    there is done, and a program is dispatched when what it reads has arrived.
    """

    name = "dma"

    def __init__(
        self, pools: tuple[Shaped[Array, "E n"], ...], device: jax.Device, size: int, stream: CopyStream | None = None
    ):
        self._stream = stream or CopyStream(device, events=STAGED)
        self._pools = pools
        self._block = pools[0].shape[1] * pools[0].dtype.itemsize
        with jax.default_device(device):
            self._staged = [jnp.zeros((size, pools[0].shape[1]), pools[0].dtype) for _ in range(STAGED)]
        jax.block_until_ready(self._staged)
        self._turn = 0

    def send(self, group: Group) -> int:
        turn, self._turn = self._turn, (self._turn + 1) % STAGED
        source, target = self._pools[group.layer].unsafe_buffer_pointer(), self._staged[turn].unsafe_buffer_pointer()
        self._stream.enter()
        for index, expert in enumerate(group.experts[: group.count].tolist()):
            self._stream.copy(target + index * self._block, source + expert * self._block, self._block)
        self._stream.record(turn)
        return turn

    def receive(self, sent: int) -> Shaped[Array, "G n"]:
        self._stream.enter()
        self._stream.wait(sent)
        return self._staged[sent]

    def close(self) -> None:
        self._stream.close()


def make_sender(pools: tuple[Shaped[Array, "E n"], ...], device: jax.Device, size: int) -> Sender:
    """The fastest sender of groups of `size` experts that the device's backend has."""
    if device.platform == "gpu":
        try:
            return CopySender(pools, device, size)
        except ConfigError as error:
            log.warning("prompts: %s, which is what sends experts now", error)
    return DevicePutSender(pools, device)


class Arrivals:
    """The groups of a pass in the order in which they are needed, some of them on their way.

    Made when nothing that was sent before is computed with any more.
    """

    def __init__(self, sender: Sender, groups: list[list[Group]]):
        self._sender = sender
        self._waiting = deque(group for layer in groups for group in layer)
        self._under_way: deque[Any] = deque()
        self._computing: deque[Array] = deque()
        for _ in range(AHEAD):
            self._send()

    def next(self) -> Shaped[Array, "G n"]:
        return self._sender.receive(self._under_way.popleft())

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
