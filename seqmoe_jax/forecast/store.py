"""Predictors on disk: safetensors parts in bfloat16, the configuration in their header, the evaluation beside them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from seqmoe_jax.checkpoints.header import header_length, parse_header
from seqmoe_jax.errors import CheckpointError, PredictorError
from seqmoe_jax.forecast.config import PredictorConfig

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
    paths = sorted(Path(directory).glob(f"{stem}-*.safetensors"))
    if not paths:
        raise PredictorError(f"{directory}: no predictor here, expected {stem}-1.safetensors, ...")
    flat: dict[str, np.ndarray] = {}
    text, parts = None, 0
    for path in paths:
        header, tensors = _read(path)
        text = header.get("seqmoe_predictor", text)
        parts = int(header.get("parts", 0))
        flat |= tensors
    if text is None or parts != len(paths):
        raise PredictorError(f"{directory}: expected {parts} parts of a predictor, found {len(paths)}")
    config = PredictorConfig.from_dict(json.loads(text))
    for name, value in flat.items():
        if value.dtype == ml_dtypes.bfloat16:
            flat[name] = value.astype(dtype)
    return config, unflatten(flat, config.blocks)


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
    data = path.read_bytes()
    try:
        size = 8 + header_length(path, data[:8], len(data))
        infos = parse_header(path, data[8:size], len(data))
        tensors = {
            name: np.frombuffer(data, info.dtype, math.prod(info.shape), info.offset).reshape(info.shape)
            for name, info in infos.items()
        }
        return json.loads(data[8:size]).get("__metadata__", {}), tensors
    except (CheckpointError, KeyError, ValueError) as error:
        raise PredictorError(f"{path}: not a predictor file ({error})") from error


def find(model: str) -> Path:
    """The shipped predictor of a model, by the last part of its id."""
    directory = SHIPPED / model.rstrip("/").rsplit("/", 1)[-1].lower()
    if not directory.is_dir():
        there = sorted(path.name for path in SHIPPED.glob("*") if path.is_dir()) if SHIPPED.is_dir() else []
        raise PredictorError(
            f"no predictor ships for model {model!r} (there are: {', '.join(there) or 'none'}); "
            "train one with `seqmoe train-predictor`"
        )
    return directory


def load_named(
    name: str | Path, model: str | None = None, dtype: Any = np.float32
) -> tuple[PredictorConfig, dict[str, Any]]:
    """A predictor by directory, or "auto" for the one that ships for `model`."""
    if name == "auto":
        if model is None:
            raise PredictorError("predictor 'auto' needs a model to look up; name one with --model")
        return load(find(model), dtype=dtype)
    return load(Path(name), dtype=dtype)
