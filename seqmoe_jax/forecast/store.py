"""Predictors on disk: safetensors parts in bfloat16, the configuration in their header, the evaluation beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from seqmoe_jax.errors import PredictorError
from seqmoe_jax.forecast.config import PredictorConfig, short_name

PART_BYTES = 14_000_000
SHIPPED = Path(__file__).resolve().parent.parent / "predictors"
EVALUATION = "evaluation.json"
_TYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "U16": np.dtype(np.uint16),
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def flatten(weights: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The plain pytree by dotted names."""
    flat = {name: np.asarray(value) for name, value in weights.items() if name != "blocks"}
    for index, block in enumerate(weights["blocks"]):
        flat |= {f"blocks.{index}.{name}": np.asarray(value) for name, value in block.items()}
    return flat


def unflatten(flat: Mapping[str, np.ndarray], blocks: int) -> dict[str, Any]:
    weights: dict[str, Any] = {name: value for name, value in flat.items() if not name.startswith("blocks.")}
    weights["blocks"] = [
        {name.split(".", 2)[2]: value for name, value in flat.items() if name.startswith(f"blocks.{index}.")}
        for index in range(blocks)
    ]
    return weights


def save(
    directory: Path,
    config: PredictorConfig,
    weights: Mapping[str, Any],
    table: np.ndarray | None = None,
    *,
    stem: str = "predictor",
    part_bytes: int = PART_BYTES,
) -> list[Path]:
    """Writes `stem`-1.safetensors, ...; matrices in bfloat16. `table` gives the embedding row of every token id."""
    flat = flatten(weights)
    small = {name: value for name, value in flat.items() if value.ndim == 1}
    flat = {name: value.astype(np.float32 if name in small else ml_dtypes.bfloat16) for name, value in flat.items()}
    if table is not None:
        flat["token_table"] = table.astype(np.uint16 if table.max() < 1 << 16 else np.int32)
    parts: list[dict[str, np.ndarray]] = [{}]
    for name, value in sorted(flat.items()):
        if parts[-1] and sum(array.nbytes for array in parts[-1].values()) + value.nbytes > part_bytes:
            parts.append({})
        parts[-1][name] = value
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for index, part in enumerate(parts, 1):
        metadata = {"seqmoe_predictor": config.to_json(), "part": str(index), "parts": str(len(parts))}
        paths.append(directory / f"{stem}-{index}.safetensors")
        paths[-1].write_bytes(_file(part, metadata))
    return paths


def load(
    directory: Path, *, stem: str = "predictor", dtype: Any = np.float32
) -> tuple[PredictorConfig, dict[str, Any]]:
    """The configuration and the plain pytree, matrices in `dtype`. Raises `PredictorError` in one line."""
    paths = _parts(directory, stem)
    flat: dict[str, np.ndarray] = {}
    text, parts = None, 0
    for path in paths:
        header, tensors = _read(path)
        text = header.get("seqmoe_predictor", text)
        parts = int(header.get("parts", 0))
        flat |= tensors
    if parts != len(paths):
        raise PredictorError(f"{directory}: expected {parts} parts of a predictor, found {len(paths)}")
    config = _parse(directory, text)
    for name, value in flat.items():
        if value.dtype == ml_dtypes.bfloat16:
            flat[name] = value.astype(dtype)
    return config, unflatten(flat, config.blocks)


def read_config(directory: str | Path, *, stem: str = "predictor") -> PredictorConfig:
    """The configuration alone, from the header of the first part. Raises `PredictorError`."""
    path = _parts(directory, stem)[0]
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise PredictorError(f"{path}: not a predictor file ({error})") from error
    return _parse(directory, metadata.get("seqmoe_predictor"))


def _parts(directory: str | Path, stem: str) -> list[Path]:
    paths = sorted(Path(directory).glob(f"{stem}-*.safetensors"))
    if not paths:
        raise PredictorError(f"{directory}: no predictor here, expected {stem}-1.safetensors, ...")
    return paths


def _parse(directory: str | Path, text: str | None) -> PredictorConfig:
    if text is None:
        raise PredictorError(f"{directory}: expected a predictor, got safetensors files of something else")
    try:
        return PredictorConfig.from_dict(json.loads(text))
    except ValueError as error:
        raise PredictorError(f"{directory}: not a predictor's configuration: {error}") from error


def _file(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file: length of the header, header, bytes of the tensors."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, value in tensors.items():
        span = [offset, offset + value.nbytes]
        header[name] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": span}
        offset += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(value.tobytes() for value in tensors.values())


def _read(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    try:
        with safe_open(path, framework="numpy") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise PredictorError(f"{path}: not a predictor file ({error})") from error


def find_predictor(model: str | Path, *, layers: int, experts: int, active: int) -> Path | None:
    """The predictor that ships for a model, or None.

    It is the one whose directory in `seqmoe_jax/predictors` is named as the last part of the model's id or path is
    (`openai/gpt-oss-20b` and `/models/gpt-oss-20b` alike, in any case of letters), or as what a download of the Hub
    is named in the cache, if its L `layers`, E `experts` and K `active` are those of the model too.
    """
    directory = SHIPPED / short_name(model)
    if not directory.is_dir():
        return None
    config = read_config(directory)
    return directory if (config.layers, config.experts, config.active) == (layers, experts, active) else None


def choose_predictor(
    choice: str | Path, model: str | Path | None, *, layers: int, experts: int, active: int
) -> Path | None:
    """The directory that a user's choice means: "none", "auto" (what `find_predictor` says), or a path.

    Raises `PredictorError` where a path holds no predictor, or one for a model of another name, L, E or K; and for
    "auto" without a model to look up.
    """
    if choice == "none":
        return None
    if choice == "auto":
        if model is None:
            raise PredictorError("predictor 'auto' needs a model to look up; name one with --model")
        return find_predictor(model, layers=layers, experts=experts, active=active)
    read_config(choice).check(layers=layers, experts=experts, active=active, model=model)
    return Path(choice)


def require_predictor(choice: str | Path, model: str | Path | None, *, layers: int, experts: int, active: int) -> Path:
    """`choose_predictor` for those who cannot do without one: raises `PredictorError` where it finds none."""
    found = choose_predictor(choice, model, layers=layers, experts=experts, active=active)
    if found is None:
        there = ", ".join(sorted(path.name for path in SHIPPED.glob("*") if path.is_dir())) or "none"
        shape = f"L={layers}, E={experts}, K={active}"
        raise PredictorError(
            f"no predictor ships for model {str(model)!r} with {shape} (there are: {there}); "
            "train one with `seqmoe train-predictor`"
        )
    return found
