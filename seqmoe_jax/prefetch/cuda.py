"""Copies beside what XLA runs: a stream of their own."""

from __future__ import annotations

import ctypes

import jax

from seqmoe_jax.cuda import Driver


class CopyStream(Driver):
    """A stream of its own in the context of JAX's device, with some events. Raises `ConfigError` where a call fails."""

    def __init__(self, device: jax.Device, *, events: int):
        super().__init__(device, purpose="copies beside the model", remedy="use device_put")
        self.enter()
        handle = ctypes.c_void_p
        stream = handle()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)  # 1: does not wait for the default stream
        self.stream = int(stream.value or 0)
        self.events = []
        for _ in range(events):
            event = handle()
            self.call("cuEventCreate", ctypes.byref(event), 2)  # 2: without timing
            self.events.append(int(event.value or 0))

    def synchronize(self) -> None:
        self.enter()
        self.call("cuStreamSynchronize", ctypes.c_void_p(self.stream))

    def close(self) -> None:
        self.synchronize()
        self.call("cuStreamDestroy_v2", ctypes.c_void_p(self.stream))
        for event in self.events:
            self.call("cuEventDestroy_v2", ctypes.c_void_p(event))
        super().close()
