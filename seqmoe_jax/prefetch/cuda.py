"""Copies beside what XLA runs: the few calls of the CUDA driver that this takes, by ctypes, so no toolkit is needed."""

from __future__ import annotations

import ctypes
from typing import Any

import jax

from seqmoe_jax.errors import ConfigError


class CopyStream:
    """A stream of its own in the context of JAX's device, with some events. Raises `ConfigError` where a call fails."""

    def __init__(self, device: jax.Device, *, events: int):
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError(f"copies beside the model need the CUDA driver: {error}; use device_put") from error
        handle = ctypes.c_void_p
        self._context = handle()
        self._ordinal = getattr(device, "local_hardware_id", None) or 0
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._ordinal)
        self.enter()
        stream = handle()
        self._call("cuStreamCreate", ctypes.byref(stream), 1)  # 1: does not wait for the default stream
        self.stream = int(stream.value or 0)
        self.events = []
        for _ in range(events):
            event = handle()
            self._call("cuEventCreate", ctypes.byref(event), 2)  # 2: without timing
            self.events.append(int(event.value or 0))

    def enter(self) -> None:
        """Makes JAX's context that of the calling thread."""
        self._call("cuCtxSetCurrent", self._context)

    def synchronize(self) -> None:
        self.enter()
        self._call("cuStreamSynchronize", ctypes.c_void_p(self.stream))

    def close(self) -> None:
        self.synchronize()
        self._call("cuStreamDestroy_v2", ctypes.c_void_p(self.stream))
        for event in self.events:
            self._call("cuEventDestroy_v2", ctypes.c_void_p(event))
        self._call("cuDevicePrimaryCtxRelease_v2", self._ordinal)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            raise ConfigError(f"copies beside the model: {name} failed with status {status}; use device_put")
