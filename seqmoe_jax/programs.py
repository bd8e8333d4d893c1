"""Compiled programs: what an engine has compiled, under which key, and how long people waited for that."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

log = logging.getLogger("seqmoe_jax")


class Programs:
    """The compiled programs of one engine. It holds no arrays, so whoever holds it keeps no device memory alive.

    `announce` is told what is about to be compiled, because that can take seconds.

    A key names a function and everything that its shapes and static arguments depend on: working that out from the
    arguments themselves would take longer than a step.
    """

    def __init__(self, announce: Callable[[str], None] | None = None):
        self._announce = announce or log.info
        self._made: dict[Hashable, Future[jax.stages.Compiled]] = {}
        self.compile_s = 0.0  # seconds that callers have waited

    def prepare(self, key: Hashable, what: str, function: Any, *args: Any, **static: Any) -> None:
        """Begins to compile a jitted `function`, in a thread of its own, beside what the caller does next.

        `args` may be `jax.ShapeDtypeStruct`s with shardings. `what` is what people are told. Tracing and lowering are
        done at once: in two threads it would be left to chance which of two programs is the first to trace a kernel
        that both use, and with it the keys under which the persistent cache has them.
        """
        if key in self._made:
            return
        self._announce(f"compiling {what}")
        started = time.perf_counter()
        lowered, made = function.lower(*args, **static), self._made.setdefault(key, Future())
        threading.Thread(target=_compile, args=(lowered, made), name="seqmoe-compile", daemon=True).start()
        self.compile_s += time.perf_counter() - started

    def get(self, key: Hashable, what: str, function: Any, *args: Any, **static: Any) -> jax.stages.Compiled:
        """The program of a jitted `function` for arguments like these: compiled now where nobody has prepared it."""
        made = self._made.get(key)
        if made is not None and made.done() and made.exception() is None:
            return made.result()
        if made is None:
            self.prepare(key, what, function, *args, **static)
        started = time.perf_counter()
        try:
            return self._made[key].result()
        except BaseException:  # the next caller tries again
            self._made.pop(key, None)
            raise
        finally:
            self.compile_s += time.perf_counter() - started

    def named(self, name: str) -> list[jax.stages.Compiled]:
        """The programs whose key begins with `name`, oldest first."""
        keys = [key for key in self._made if isinstance(key, tuple) and key[0] == name]
        return [self._made[key].result() for key in keys]


def on_device(tree: Any, device: jax.Device) -> Any:
    """Shapes and dtypes of a tree, for arrays in the memory of a device."""
    here = SingleDeviceSharding(device)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), tree)


def shapes_of(tree: Any) -> Any:
    """Arrays of a tree as their shapes, dtypes and shardings: what a program can be made for ahead of time."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), tree)


def _compile(lowered: jax.stages.Lowered, made: Future[jax.stages.Compiled]) -> None:
    try:
        made.set_result(lowered.compile())
    except BaseException as error:
        made.set_exception(error)
