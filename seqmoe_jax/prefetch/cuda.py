"""Copies beside what XLA runs: the few calls of the CUDA driver that this takes, by ctypes, so no toolkit is needed."""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import numpy as np

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
        made = []
        for _ in range(events):
            event = handle()
            self._call("cuEventCreate", ctypes.byref(event), 2)  # 2: without timing
            made.append(int(event.value or 0))
        self.events = np.array(made, np.int64)

    def enter(self) -> None:
        """Makes JAX's context that of the calling thread."""
        self._call("cuCtxSetCurrent", self._context)

    def copy(self, target: int, source: int, size: int) -> None:
        """`size` bytes from pinned host memory to the device, addresses as integers; asynchronous."""
        word = ctypes.c_uint64
        self._call("cuMemcpyHtoDAsync_v2", word(target), word(source), ctypes.c_size_t(size), self._handle(self.stream))

    def record(self, event: int) -> None:
        """`wait(event)` will wait for everything copied so far."""
        self._call("cuEventRecord", self._handle(self.events[event]), self._handle(self.stream))

    def wait(self, event: int) -> None:
        self._call("cuEventSynchronize", self._handle(self.events[event]))

    def synchronize(self) -> None:
        self.enter()
        self._call("cuStreamSynchronize", self._handle(self.stream))

    def close(self) -> None:
        self.synchronize()
        self._call("cuStreamDestroy_v2", self._handle(self.stream))
        for event in self.events:
            self._call("cuEventDestroy_v2", self._handle(event))
        self._call("cuDevicePrimaryCtxRelease_v2", self._ordinal)

    @staticmethod
    def _handle(value: Any) -> ctypes.c_void_p:
        return ctypes.c_void_p(int(value))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            raise ConfigError(f"copies beside the model: {name} failed with status {status}; use device_put")
