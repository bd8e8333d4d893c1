"""What a predictor is: for which model, from which inputs, how large."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seqmoe_jax.errors import PredictorError
from seqmoe_jax.forecast.features import FIRST_ROW
from seqmoe_jax.forecast.mamba2 import Mamba2Config

INPUTS = ("activations", "activations+token")
KINDS = ("sum", "next")


def short_name(model: str | Path) -> str:
    """What a model goes by: the last part of its id or path, in small letters; of a Hub cache, the repository's name.

    `openai/gpt-oss-20b`, `/models/GPT-OSS-20B/` and `.../models--openai--gpt-oss-20b/snapshots/...` are one model.
    """
    parts = Path(model).parts
    cached = [part.rsplit("--", 1)[-1] for part in parts if part.startswith("models--")]
    return (cached or list(parts) or [""])[-1].lower()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
    """A score of future use, counted from the step *after* the one that the next-step head forecasts.

    "sum": (1 - discount) * sum over later steps of discount^(j - 1), where they use the key, j = 1, 2, ...
    "next": discount^(j - 1) for the first later step j that uses it, which is what Belady's policy orders by.
    """

    kind: str = "next"
    discount: float = 0.9

    def __post_init__(self) -> None:
        if self.kind not in KINDS or not 0 < self.discount < 1:
            raise PredictorError(f"retention is one of {', '.join(KINDS)} with a discount in (0, 1), got {self}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictorConfig:
    """Sizes: L `layers`, E `experts`, K `active`, width D; `token_rows` embedding rows serve `vocabulary` token ids.

    `echo` is the number of past steps searched for an earlier occurrence of the coming token (0: none). `power` is
    applied to routing probabilities before the projections: 0.5 keeps lightly weighted experts visible.
    """

    model: str
    layers: int
    experts: int
    active: int
    inputs: str = "activations+token"
    width: int = 640
    blocks: int = 2
    expand: int = 2
    head: int = 64
    columns: int = 64
    vocabulary: int = 0
    token_rows: int = FIRST_ROW
    token_width: int = 96
    echo: int = 512
    power: float = 0.5
    refine_width: int = 768
    retention: tuple[Retention, ...] = (Retention(),)

    def __post_init__(self) -> None:
        if self.inputs not in INPUTS:
            raise PredictorError(f"inputs must be one of {', '.join(INPUTS)}, got {self.inputs!r}")
        if min(self.layers, self.experts, self.active, self.width, self.blocks) < 1 or self.active > self.experts:
            raise PredictorError(
                f"a predictor needs positive sizes and K <= E, got L={self.layers}, E={self.experts}, K={self.active}, "
                f"width {self.width}, {self.blocks} blocks"
            )
        self.block  # whose sizes must fit too  # noqa: B018

    @property
    def keys(self) -> int:
        return self.layers * self.experts

    @property
    def uses_token(self) -> bool:
        return self.inputs == "activations+token"

    @property
    def uses_echo(self) -> bool:
        return self.uses_token and self.echo > 0

    @property
    def block(self) -> Mamba2Config:
        return Mamba2Config(width=self.width, expand=self.expand, head=self.head, columns=self.columns)

    def check(self, *, layers: int, experts: int, active: int, model: str | Path | None = None) -> None:
        """Raises `PredictorError` where this predictor is for another model (by `short_name`) or shape."""
        if model is not None and short_name(model) != short_name(self.model):
            raise PredictorError(
                f"the predictor is for model {self.model!r}, got {str(model)!r}; train one or pass --predictor"
            )
        if (layers, experts, active) != (self.layers, self.experts, self.active):
            raise PredictorError(
                f"the predictor of {self.model!r} is for L={self.layers}, E={self.experts}, K={self.active}, "
                f"got L={layers}, E={experts}, K={active}; train one with `seqmoe train-predictor`"
            )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> PredictorConfig:
        """The inverse of `dataclasses.asdict`; a missing or unknown field is a `PredictorError`."""
        fields = dict(fields)
        try:
            fields["retention"] = tuple(Retention(**retention) for retention in fields["retention"])
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise PredictorError(f"not a predictor's configuration: {error}") from error
