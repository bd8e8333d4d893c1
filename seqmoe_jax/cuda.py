"""The few calls of the CUDA driver that JAX does not make for us, by ctypes, so no toolkit is needed."""

from __future__ import annotations

import ctypes
from typing import Any

import jax

from seqmoe_jax.errors import ConfigError


class Driver:
    """The driver, for calls in the context that JAX has on a device. Raises `ConfigError` where one fails.

    `purpose` begins what is said then, `remedy` ends it.
    """

    def __init__(self, device: jax.Device, *, purpose: str, remedy: str):
        self._purpose, self._remedy = purpose, remedy
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError(f"{purpose} needs the CUDA driver: {error}; {remedy}") from error
        self._context = ctypes.c_void_p()
        self._ordinal = getattr(device, "local_hardware_id", None) or 0
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._ordinal)

    def enter(self) -> None:
        """Makes JAX's context that of the calling thread."""
        self.call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            raise ConfigError(f"{self._purpose}: {name} failed with status {status}; {self._remedy}")

    def close(self) -> None:
        self.call("cuDevicePrimaryCtxRelease_v2", self._ordinal)
