"""What a predictor is: for which model, from which inputs, how large."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from seqmoe_jax.errors import PredictorError
from seqmoe_jax.fields import Fields, Range
from seqmoe_jax.forecast.features import FIRST_ROW
from seqmoe_jax.forecast.mamba2 import Mamba2Config

# What a size of a predictor may be; others are from 1 to `fields.SIZES`.
RANGES: dict[str, Range] = {
    "layers": (1, 512), "experts": (1, 1 << 13), "active": (1, 1 << 13), "d_model": (1, 1 << 14), "blocks": (1, 64),
    "expand": (1, 16), "head_dim": (1, 1 << 12), "d_state": (1, 1 << 12), "vocabulary": (0, 1 << 24),
    "token_rows": (1, 1 << 24), "token_width": (1, 1 << 14), "echo": (0, 1 << 16), "power": (0.01, 10.0),
    "refine_width": (1, 1 << 16), "discount": (0.0, 1.0),
}  # fmt: skip
INPUTS = ("activations", "activations+token")


def short_name(model: str | Path) -> str:
    """What a model goes by: the last part of its id or path, in small letters; of a Hub cache, the repository's name.

    `openai/gpt-oss-20b`, `/models/GPT-OSS-20B/` and `.../models--openai--gpt-oss-20b/snapshots/...` are one model.
    """
    parts = Path(model).parts
    cached = [part.rsplit("--", 1)[-1] for part in parts if part.startswith("models--")]
    return (cached or list(parts) or [""])[-1].lower()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictorConfig:
    """The model that a predictor is for (L `layers`, E `experts`, K `active`), its inputs and its sizes.

    `d_model`, `expand`, `head_dim` and `d_state` are those of its `blocks` Mamba2 blocks. `token_rows` embedding rows
    of `token_width` values serve `vocabulary` token ids. `echo` is the number of past steps that are searched for an
    earlier occurrence of the coming token (0: none). `power` is applied to routing probabilities before the
    projections: 0.5 keeps lightly weighted experts visible. `refine_width` is the inner width of the refinement.

    The retention score of a key is `discount`^(j - 1) for the first step j = 1, 2, ... that uses it *after* the one
    that the next-step head forecasts, which is what Belady's policy orders by; 0 where none does.
    """

    model: str
    layers: int
    experts: int
    active: int
    inputs: str = "activations+token"
    d_model: int = 640
    blocks: int = 2
    expand: int = 2
    head_dim: int = 64
    d_state: int = 64
    vocabulary: int = 0
    token_rows: int = FIRST_ROW
    token_width: int = 96
    echo: int = 512
    power: float = 0.5
    refine_width: int = 768
    discount: float = 0.9

    def __post_init__(self) -> None:
        if self.inputs not in INPUTS:
            raise PredictorError(f"inputs must be one of {', '.join(INPUTS)}, got {self.inputs!r}")
        if min(self.layers, self.experts, self.active, self.d_model, self.blocks) < 1 or self.active > self.experts:
            raise PredictorError(
                f"a predictor needs positive sizes and K <= E, got L={self.layers}, E={self.experts}, K={self.active}, "
                f"width {self.d_model}, {self.blocks} blocks"
            )
        if not 0 < self.discount < 1:
            raise PredictorError(f"the discount of retention must be in (0, 1), got {self.discount}")
        self.block  # noqa: B018  # the sizes of a block must fit too, and its configuration checks them

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
        return Mamba2Config(d_model=self.d_model, expand=self.expand, head_dim=self.head_dim, d_state=self.d_state)

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
    def from_dict(cls, values: Mapping[str, Any], where: str = "the predictor's configuration") -> PredictorConfig:
        """The inverse of `dataclasses.asdict`. Raises `PredictorError`, which begins with `where`, for a field that is
        missing, unknown, or not what it must be."""
        fields = Fields(values, where, ranges=RANGES, error=PredictorError)
        known = dataclasses.fields(cls)
        fields.only(*(field.name for field in known))
        read: dict[str, Callable[[str], Any]] = {"str": fields.text, "int": fields.size, "float": fields.number}
        needed = [field for field in known if field.default is dataclasses.MISSING]
        given = [field for field in known if field.name in values or field in needed]
        try:
            return cls(**{field.name: read[str(field.type)](field.name) for field in given})
        except PredictorError as error:
            raise error if str(error).startswith(where) else PredictorError(f"{where}: {error}") from None
