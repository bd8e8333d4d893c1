"""What people see on standard error while something takes long. Imports nothing of this package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def shows_progress(wanted: bool | None) -> bool:
    """Whether bars and messages are shown; by default where somebody sees them, in a terminal or a notebook."""
    return (sys.stderr.isatty() or "ipykernel" in sys.modules) if wanted is None else wanted


class ProgressBar:
    """A progress bar, over bytes unless said otherwise, shown for what takes longer than a second."""

    def __init__(self, shown: bool, label: str, *, unit: str = "B"):
        self._shown, self._label, self._unit = shown, label, unit
        self._bar: Any = None

    def __enter__(self) -> Callable[[int, int], None] | None:
        return self._update if self._shown else None

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _update(self, done: int, total: int) -> None:
        from tqdm.auto import tqdm

        if self._bar is None:
            self._bar = tqdm(
                total=total, desc=self._label, unit=self._unit, unit_scale=self._unit == "B", delay=1.0, leave=False,
                file=sys.stderr,
            )  # fmt: skip
        self._bar.update(done - self._bar.n)


def say(message: str) -> None:
    """A message about what is being compiled."""
    print(f"seqmoe: {message} (once; kept in the compilation cache)", file=sys.stderr)
