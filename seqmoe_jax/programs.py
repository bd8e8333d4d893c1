"""Compiled programs: what an engine has compiled, under which key, and how long that took."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import Any

import jax

log = logging.getLogger("seqmoe_jax")


class Programs:
    """The compiled programs of one engine. It knows no arrays, so whoever holds it keeps no device memory alive.

    `announce` is told what is about to be compiled, because that can take seconds.
    """

    def __init__(self, announce: Callable[[str], None] | None = None):
        self._announce = announce or log.info
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}
        self.compile_s = 0.0  # seconds spent compiling so far

    def get(self, key: Hashable, what: str, function: Any, *args: Any, **static: Any) -> jax.stages.Compiled:
        """The program of a jitted `function` for arguments of these shapes, compiled where `key` is new.

        `key` names the function and everything that its shapes and static arguments depend on: working that out from
        the arguments themselves would take longer than a step. `what` is what people are told meanwhile.
        """
        program = self._compiled.get(key)
        if program is None:
            self._announce(f"compiling {what}")
            started = time.perf_counter()
            program = self._compiled[key] = function.lower(*args, **static).compile()
            self.compile_s += time.perf_counter() - started
        return program

    def named(self, name: str) -> list[jax.stages.Compiled]:
        """The programs whose key begins with `name`, oldest first."""
        return [program for key, program in self._compiled.items() if isinstance(key, tuple) and key[0] == name]
