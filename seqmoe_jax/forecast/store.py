"""Predictors on disk: safetensors parts in bfloat16, the configuration in their metadata, the evaluation beside them.

Every part `predictor-N.safetensors` has as metadata `seqmoe_predictor`, the `PredictorConfig` as JSON, `parts`, how
many there are, and, where `seqmoe train-predictor` wrote it, `seqmoe_run`: what the predictor was made from and how.
Tensors are named as in the predictor's plain pytree, those of block i with `blocks.i.` before it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Integer
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialize

from seqmoe_jax.compilation import cache_directory
from seqmoe_jax.errors import PredictorError
from seqmoe_jax.fields import shown
from seqmoe_jax.forecast.config import PredictorConfig, short_name
from seqmoe_jax.forecast.tensors import check_tensors
from seqmoe_jax.inputs import check_file, parse_json
from seqmoe_jax.outputs.directories import make_directory, writing_directory
from seqmoe_jax.outputs.files import writing
from seqmoe_jax.outputs.parts import parts_of
from seqmoe_jax.outputs.runs import Run, from_json, to_json

PART_BYTES = 14_000_000
SHIPPED = Path(__file__).resolve().parent.parent / "predictors"
EVALUATION = "evaluation.json"
LEARNED = "learned.json"  # how `seqmoe learn` made a predictor, and what it found that it is worth
FILES = ("predictor-*.safetensors", EVALUATION, LEARNED)
# The predictors that ship were written when their configuration and their tensors had these names.
FORMER_NAMES = {"width": "d_model", "head": "head_dim", "columns": "d_state", "log_rate": "A_log", "skip": "D"}


def save(
    directory: Path,
    config: PredictorConfig,
    weights: Mapping[str, Any],
    table: Integer[np.ndarray, " vocabulary"] | None = None,
    *,
    run: Run | None = None,
    part_bytes: int = PART_BYTES,
) -> list[Path]:
    """Writes predictor-1.safetensors, ..., matrices in bfloat16 and vectors in float32, into a new or empty directory.

    `table` is the embedding row of every token id; `run` is what the predictor was made from and how. Raises
    `OutputError`.
    """
    flat = {name: np.asarray(value) for name, value in weights.items() if name != "blocks"}
    for index, block in enumerate(weights["blocks"]):
        flat |= {f"blocks.{index}.{name}": np.asarray(value) for name, value in block.items()}
    flat = {name: value.astype(np.float32 if value.ndim == 1 else ml_dtypes.bfloat16) for name, value in flat.items()}
    if table is not None:
        flat["token_table"] = table.astype(np.uint16 if table.max() < 1 << 16 else np.int32)
    parts: list[dict[str, np.ndarray]] = [{}]
    for name, value in sorted(flat.items()):
        if parts[-1] and sum(array.nbytes for array in parts[-1].values()) + value.nbytes > part_bytes:
            parts.append({})
        parts[-1][name] = np.ascontiguousarray(value)
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"predictor-{index}.safetensors" for index in range(1, len(parts) + 1)]
    metadata = {"seqmoe_predictor": config.to_json(), "parts": str(len(parts))}
    if run is not None:
        metadata["seqmoe_run"] = to_json(run)
    for path, part in zip(paths, parts, strict=True):
        with writing(path) as file:
            file.write(_serialized(part, metadata))
    return paths


def _serialized(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> bytes:
    """A file's bytes, the same for the same contents: safetensors itself writes metadata in any order."""
    plain = serialize(tensors)
    size = int.from_bytes(plain[:8], "little")
    header = json.dumps({"__metadata__": metadata} | json.loads(plain[8 : 8 + size])).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    return len(header).to_bytes(8, "little") + header + plain[8 + size :]


def read_run(directory: Path) -> Run | None:
    """The run that a predictor was made by: empty where it does not say, None where the directory has none."""
    try:
        metadata, _ = _read(_parts(directory)[0], tensors=False)
        _config(directory, metadata)
    except PredictorError:
        return None
    return from_json(metadata.get("seqmoe_run", "{}"))


def load(directory: Path, *, dtype: Any = np.float32) -> tuple[PredictorConfig, dict[str, Any]]:
    """The configuration and the plain pytree, matrices in `dtype`. Raises `PredictorError`."""
    flat: dict[str, np.ndarray] = {}
    found = []
    for path in (paths := _parts(directory)):
        metadata, tensors = _read(path)
        found.append(_config(directory, metadata))
        if metadata.get("parts") != str(len(paths)) or found[0] != found[-1]:
            parts = shown(metadata.get("parts"))
            raise PredictorError(f"{directory}: expected {parts} parts of one predictor, found {len(paths)} files")
        flat |= {_newer(name): tensor for name, tensor in tensors.items()}
    config = found[0]
    try:
        check_tensors(config, flat)
    except PredictorError as error:
        raise PredictorError(f"{directory}: {error}") from None
    weights: dict[str, Any] = {"blocks": [{} for _ in range(config.blocks)]}
    for name, value in flat.items():
        value = value.astype(dtype) if value.dtype == ml_dtypes.bfloat16 else value
        *block, name = name.split(".")
        (weights["blocks"][int(block[1])] if block else weights)[name] = value
    return config, weights


def _newer(name: str) -> str:
    """The name that a tensor goes by now."""
    block, dot, own = name.rpartition(".")
    return block + dot + FORMER_NAMES.get(own, own)


def read_config(directory: str | Path) -> PredictorConfig:
    """The configuration alone, from the header of the first part. Raises `PredictorError`."""
    return _config(directory, _read(_parts(directory)[0], tensors=False)[0])


def _parts(directory: str | Path) -> list[Path]:
    # `glob` itself raises for a name that is too long.
    paths = sorted(Path(directory).glob("predictor-*.safetensors")) if os.path.isdir(directory) else []
    if not paths:
        raise PredictorError(f"{directory}: no predictor here, expected predictor-1.safetensors, ...")
    return paths


def _read(path: Path, *, tensors: bool = True) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Metadata and tensors of a file."""
    check_file(path, "a predictor file", PredictorError)
    try:
        with safe_open(path, framework="numpy") as file:
            names = file.keys() if tensors else []
            return file.metadata() or {}, {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, TypeError, ValueError) as error:  # the middle two for formats that NumPy has not
        raise PredictorError(f"{path}: not a predictor file ({error})") from error


def _config(directory: str | Path, metadata: Mapping[str, str]) -> PredictorConfig:
    if "seqmoe_predictor" not in metadata:
        raise PredictorError(f"{directory}: expected a predictor, got safetensors files of something else")
    where = f"{directory}: the predictor's configuration"
    fields = parse_json(metadata["seqmoe_predictor"], where, error=PredictorError)
    if not isinstance(fields, dict):
        raise PredictorError(f"{where}: expected an object, got {shown(fields)}")
    fields = {FORMER_NAMES.get(name, name): value for name, value in fields.items()}
    if (retention := fields.pop("retention", None)) is not None:  # formerly a list of kinds of scores
        try:
            [fields["discount"]] = [score["discount"] for score in retention if score["kind"] == "next"]
        except (KeyError, TypeError, ValueError):
            raise PredictorError(
                f"{where}: expected retention scores of one kind 'next', got {shown(retention)}"
            ) from None
    return PredictorConfig.from_dict(fields, where)


def find_predictor(model: str | Path, *, layers: int, experts: int, active: int) -> Path | None:
    """The directory of the predictor that is installed for a model, else of the one that ships for it, or None.

    It is found by the model's `short_name`, and must be of the model's L `layers`, E `experts` and K `active`.
    """
    for directory in (installed(model), SHIPPED / short_name(model)):
        if directory.is_dir():
            config = read_config(directory)
            if (config.layers, config.experts, config.active) == (layers, experts, active):
                return directory
    return None


def installed(model: str | Path) -> Path:
    """Where the predictor is, if there is one, that `seqmoe learn` installed for a model.

    Raises `ConfigError` where there is no home directory.
    """
    return cache_directory() / "predictors" / short_name(model)


def install(directory: Path, model: str | Path) -> Path:
    """Copies a predictor to where `auto` finds it for a model, over what is there. Raises `OutputError`."""
    to = installed(model)
    make_directory(to.parent)
    with parts_of(to, {"from": str(directory)}, force=True) as parts, writing_directory(to, beside=parts) as staged:
        for path in sorted(path for pattern in FILES for path in directory.glob(pattern)):
            shutil.copyfile(path, staged / path.name)
    return to


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
    """As `choose_predictor`, but raises `PredictorError` where there is none."""
    found = choose_predictor(choice, model, layers=layers, experts=experts, active=active)
    if found is None:
        there = ", ".join(sorted(path.name for path in SHIPPED.glob("*") if path.is_dir())) or "none"
        shape = f"L={layers}, E={experts}, K={active}"
        raise PredictorError(
            f"no predictor ships for model {str(model)!r} with {shape} (there are: {there}), and none is installed; "
            "make one with `seqmoe learn` or `seqmoe train-predictor`"
        )
    return found
