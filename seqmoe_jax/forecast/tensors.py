"""The tensors of a stored predictor: their names, shapes and dtypes follow from its configuration."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from seqmoe_jax.errors import PredictorError
from seqmoe_jax.fields import shown
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.mamba2 import D_CONV

FLOATS = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
INTEGERS = (np.dtype(np.uint16), np.dtype(np.int32))
# Beside the weights there are the embedding row of every token id, and how often prompts use each expert.
BESIDE = TABLE, POPULARITY = "token_table", "popularity"
Shapes = dict[str, tuple[int, ...]]


def weight_shapes(config: PredictorConfig) -> Shapes:
    """Shapes of the weights by name, those of block i with `blocks.i.` before their own."""
    width, keys, block = config.d_model, config.keys, config.block
    inner, heads, refine = block.d_inner, block.num_heads, config.refine_width
    shapes: Shapes = {"in_proj": (keys, width), "in_bias": (width,), "norm": (width,)}
    if config.uses_token:
        shapes |= {"token_embed": (config.token_rows, config.token_width), "token_proj": (config.token_width, width)}
    if config.uses_echo:
        shapes |= {"echo_proj": (keys, width), "echo_bias": (width,)}
    for head in ("next", "retention"):
        shapes |= {f"{head}_head": (width, keys), f"{head}_bias": (keys,)}
    shapes |= {"odds_scale": (2, config.layers), "odds_bias": (2, config.layers)}
    shapes |= {"known_proj": (keys, width), "refine_norm": (width,), "refine_out_norm": (width,)}
    shapes |= {"refine_up": (width, 2 * refine), "refine_down": (refine, width), "refine_head": (width, keys)}
    mamba: Shapes = {
        "norm": (width,), "in_proj": (width, inner + block.conv_dim + heads), "conv": (D_CONV, block.conv_dim),
        "conv_bias": (block.conv_dim,), "dt_bias": (heads,), "A_log": (heads,), "D": (heads,), "gate_norm": (inner,),
        "out_proj": (inner, width),
    }  # fmt: skip
    return shapes | {f"blocks.{i}.{name}": shape for i in range(config.blocks) for name, shape in mamba.items()}


def check_tensors(config: PredictorConfig, tensors: Mapping[str, np.ndarray]) -> None:
    """Raises `PredictorError` for a tensor that is missing, unknown, of another shape or dtype, or not finite."""
    shapes = weight_shapes(config)
    table: Shapes = {TABLE: (config.vocabulary,)} if config.uses_token else {}
    needed, known = shapes | table, shapes | table | {POPULARITY: (config.layers, config.experts)}
    for name in needed.keys() - tensors.keys():
        raise PredictorError(f"expected a tensor {name!r}, got none of that name")
    for name, value in tensors.items():
        if name not in known:
            raise PredictorError(f"expected the tensors of a predictor, got {shown(name)} too")
        dtypes = INTEGERS if name == TABLE else FLOATS
        if value.shape != known[name] or value.dtype not in dtypes:
            expected = f"{' or '.join(dtype.name for dtype in dtypes)} of shape {known[name]}"
            raise PredictorError(f"expected {name!r} to be {expected}, got {value.dtype} of shape {value.shape}")
        if name != TABLE and not _finite(value):
            raise PredictorError(f"expected finite numbers, got others in {name!r}; train the predictor again")
    rows = tensors[TABLE] if table else np.zeros(0)
    if rows.size and not 0 <= rows.min() <= rows.max() < config.token_rows:
        raise PredictorError(f"expected {TABLE!r} to hold rows below {config.token_rows}, got {rows.max()}")


def _finite(value: np.ndarray) -> bool:
    if value.dtype == np.float32:
        return bool(np.isfinite(value).all())
    exponent = 0x7F80  # of a bfloat16; all ones is an infinity or NaN
    return bool(((value.view(np.uint16) & exponent) != exponent).all())
