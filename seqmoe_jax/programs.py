"""Compiled programs: what an engine has compiled, under which key, how long people waited, and giving them back.

A program holds up to hundreds of memory mappings, of which Linux allows a process 65,530. So a process keeps a bounded
number of them, and an engine that ends leaves none. What JAX holds of our functions is let go with them; those of
others are left alone, as `jax.clear_caches` would not.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from seqmoe_jax.errors import EngineError

log = logging.getLogger("seqmoe_jax")

MOST_LIVE = 128  # programs of all engines of a process, kept ones aside: the demo's hold 216 mappings each on a CPU


@dataclass(eq=False, kw_only=True)
class _Program:
    key: Hashable
    engine: dict[Hashable, _Program]  # where it is found
    kept: bool
    made: Future[jax.stages.Compiled] = field(default_factory=Future)


_lock = threading.RLock()  # finalizers may come while it is held
_live: OrderedDict[_Program, None] = OrderedDict()  # of all engines, used last at the end
_functions: weakref.WeakSet[Any] = weakref.WeakSet()  # jitted ones of ours
_cores = threading.BoundedSemaphore(max(2, os.cpu_count() or 2))  # programs that are compiled at once
_compiling: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def owned(function: Any) -> Any:
    """Marks a jitted function that is called by itself or inside programs: what JAX holds of it is let go with them."""
    _functions.add(function)
    return function


class Programs:
    """The compiled programs of one engine. It holds no arrays, so whoever holds it keeps no device memory alive.

    `announce` is told what is about to be compiled, because that can take seconds.

    A key names a function and everything that its shapes and static arguments depend on: working that out from the
    arguments themselves would take longer than a step.
    """

    def __init__(self, announce: Callable[[str], None] | None = None):
        self._announce = announce or log.info
        self._made: dict[Hashable, _Program] = {}
        self._closed = False
        self.compile_s = 0.0  # seconds that callers have waited
        weakref.finalize(self, _let_go, self._made).atexit = False

    def prepare(self, key: Hashable, what: str, function: Any, *args: Any, kept: bool = False, **static: Any) -> None:
        """Begins to compile a jitted `function`, in a thread of its own, beside what the caller does next.

        `args` may be `jax.ShapeDtypeStruct`s with shardings. `what` is what people are told. `kept`: it has been
        promised to be there from now on, however many others are made. Tracing and lowering are done at once: in two
        threads it would be left to chance which of two programs is the first to trace a kernel that both use, and with
        it the keys under which the persistent cache has them.
        """
        if self._closed:
            raise EngineError("the programs of this engine have been given back")
        with _lock:
            if (program := self._made.get(key)) is not None:
                program.kept |= kept
                return
        self._announce(f"compiling {what}")
        started = time.perf_counter()
        _functions.add(function)
        lowered = function.lower(*args, **static)
        program = _Program(key=key, engine=self._made, kept=kept)
        with _lock:
            self._made[key] = program
            _live[program] = None
        thread = threading.Thread(target=_compile, args=(lowered, program.made), name="seqmoe-compile", daemon=True)
        _compiling.add(thread)
        thread.start()
        _drop_least_used()
        self.compile_s += time.perf_counter() - started

    def get(self, key: Hashable, what: str, function: Any, *args: Any, **static: Any) -> jax.stages.Compiled:
        """The program of a jitted `function` for arguments like these: compiled now where nobody has prepared it."""
        program = self._use(key)
        if program is not None and program.made.done() and program.made.exception() is None:
            return program.made.result()
        if program is None:
            self.prepare(key, what, function, *args, **static)
            program = self._made[key]
        started = time.perf_counter()
        try:
            return program.made.result()
        except BaseException:  # the next caller tries again
            with _lock:
                self._made.pop(key, None)
                _live.pop(program, None)
            raise
        finally:
            self.compile_s += time.perf_counter() - started

    def wait(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Until all that were prepared are made. `progress` is told how many of how many are."""
        with _lock:
            made = [program.made for program in self._made.values()]
        for number, future in enumerate(made):
            if progress is not None:
                progress(number, len(made))
            future.result()
        if progress is not None:
            progress(len(made), len(made))

    def named(self, name: str) -> list[jax.stages.Compiled]:
        """The programs whose key begins with `name`, oldest first."""
        keys = [key for key in self._made if isinstance(key, tuple) and key[0] == name]
        return [self._made[key].made.result() for key in keys]

    def close(self) -> None:
        """Gives all of them back; none is made any more."""
        self._closed = True
        _let_go(self._made)

    def _use(self, key: Hashable) -> _Program | None:
        with _lock:
            program = self._made.get(key)
            if program is not None:
                _live.move_to_end(program)
            return program


def on_device(tree: Any, device: jax.Device) -> Any:
    """Shapes and dtypes of a tree, for arrays in the memory of a device."""
    here = SingleDeviceSharding(device)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), tree)


def shapes_of(tree: Any) -> Any:
    """Arrays of a tree as their shapes, dtypes and shardings: what a program can be made for ahead of time."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), tree)


def _compile(lowered: jax.stages.Lowered, made: Future[jax.stages.Compiled]) -> None:
    try:
        with _cores:
            compiled = lowered.compile()
        made.set_result(compiled)
    except BaseException as error:
        made.set_exception(error)


def _drop_least_used() -> None:
    with _lock:
        # What is still being compiled is wanted by somebody.
        idle = [program for program in _live if not program.kept and program.made.done()]
        dropped = idle[: max(0, sum(not program.kept for program in _live) - MOST_LIVE)]
        for program in dropped:
            del program.engine[program.key], _live[program]
    if dropped:
        _forget_traces()


def _let_go(programs: dict[Hashable, _Program]) -> None:
    with _lock:
        some = bool(programs)
        for program in programs.values():
            _live.pop(program, None)
        programs.clear()
    if some:
        _forget_traces()


def _forget_traces() -> None:
    """Lets go of what JAX holds of our functions: traces, what was lowered of them, and with that what was compiled."""
    for function in list(_functions):
        function.clear_cache()
    trim()


def trim() -> None:
    """Gives freed memory back to the system: XLA's compiler leaves hundreds of MB of it to the C library, which keeps
    it until it is asked."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


@atexit.register
def _leave() -> None:
    """XLA's compiler cannot be interrupted, and a process that ends under it crashes."""
    try:
        for thread in list(_compiling):
            thread.join()
    except KeyboardInterrupt:  # whoever asks again wants out
        os._exit(130)
