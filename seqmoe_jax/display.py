"""How objects show themselves: one line in a terminal, a small table in a notebook. Imports nothing of this package."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

BAR = "#0072B2"
CELL = "padding:1px 10px 1px 0;text-align:left"


def size(nbytes: float | int) -> str:
    """Bytes in the unit that leaves few digits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes:.0f} bytes"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def table(title: str, rows: Mapping[str, object], *, bar: tuple[str, float] | None = None) -> str:
    """A title and a row for each name as HTML; `bar` is a name and a share, drawn above them. All of it is escaped."""
    cells = "".join(
        f'<tr><th style="{CELL};font-weight:normal;opacity:.7">{escape(name)}</th>'
        f'<td style="{CELL}">{escape(str(value))}</td></tr>'
        for name, value in rows.items()
    )
    drawn = "" if bar is None else _bar(*bar)
    return f'<div><b>{escape(title)}</b>{drawn}<table style="border-collapse:collapse">{cells}</table></div>'


def preformatted(title: str, text: str) -> str:
    """Text with columns, as HTML."""
    return f"<div><b>{escape(title)}</b><pre>{escape(text)}</pre></div>"


def _bar(name: str, share: float) -> str:
    width = 100 * min(max(share, 0.0), 1.0)
    return (
        f'<div style="opacity:.8">{escape(name)}: {percent(share)}'
        '<div style="width:240px;height:8px;background:#8884;border-radius:4px">'
        f'<div style="width:{width:.1f}%;height:8px;background:{BAR};border-radius:4px"></div></div></div>'
    )
