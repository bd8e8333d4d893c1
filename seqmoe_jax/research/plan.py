"""`plan`: will a model fit, at which residency, and what it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from seqmoe_jax.display import percent, size, table
from seqmoe_jax.memory.report import describe, size_up
from seqmoe_jax.options import EngineKeywords, EngineOptions

PARTS = ("dense", "slot_cache", "kv", "workspace", "forecast")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer. `report` has all of it, what `seqmoe plan --json` prints: bytes, seconds, None where unknown."""

    report: Mapping[str, Any]

    @property
    def fits(self) -> bool:
        return bool(self.report["fits"])

    @property
    def reason(self) -> str | None:
        """Why it does not fit."""
        return self.report["reason"]

    @property
    def slots(self) -> int | None:
        """S: how many experts are on the device; None where no number of them fits."""
        return None if self.report["plan"] is None else int(self.report["plan"]["slots"])

    @property
    def residency(self) -> float | None:
        """S over all experts."""
        return None if self.report["plan"] is None else float(self.report["plan"]["residency"])

    @property
    def device_bytes(self) -> int | None:
        """Device memory that it takes, of which `report["plan"]` has the parts."""
        return None if self.report["plan"] is None else int(self.report["plan"]["total"])

    @property
    def host_bytes(self) -> int:
        """Pinned host memory for the experts."""
        return int(self.report["host_pool"])

    def __str__(self) -> str:
        return describe(self.report)

    def __repr__(self) -> str:
        if not self.fits or self.residency is None:
            return f"Plan({self.report['model']}: does not fit, {self.reason})"
        return (
            f"Plan({self.report['model']}: fits, {percent(self.residency)} of {self.report['experts']} experts in "
            f"slots, {size(self.device_bytes or 0)} on the device, {size(self.host_bytes)} on the host)"
        )

    def _repr_html_(self) -> str:
        plan = self.report["plan"] or {}
        rows: dict[str, object] = {"it fits": "yes" if self.fits else f"no: {self.reason}"}
        rows |= {name.replace("_", " "): size(plan[name]) for name in PARTS if plan.get(name)}
        rows |= {"host memory": size(self.host_bytes), "least residency": percent(self.report["least"]["residency"])}
        bar = None if self.residency is None else ("residency", self.residency)
        return table(f"{self.report['model']} on {self.report['device']}", rows, bar=bar)


def plan(model: str | Path = "demo", **options: Unpack[EngineKeywords]) -> Plan:
    """Whether a model fits, with how many experts on the device. Reads its `config.json` and no weights.

    `model` is what `load` takes, or the name of a preset; `options` are the fields of `EngineOptions`, of which
    `device_memory` (default: what this device has free), `residency`, `context` and `max_batch` matter.
    That it does not fit is an answer (`Plan.fits`). Raises `CheckpointError`, `ConfigError`, and `ResidencyError` for a
    residency that can never work.
    """
    return Plan(report=size_up(str(model), EngineOptions(**options)))
