"""Which predictor a choice means: by the model's name, by path, or none."""

from __future__ import annotations

import dataclasses
import json
import os

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from seqmoe_jax.errors import PredictorError
from seqmoe_jax.forecast import store
from seqmoe_jax.forecast.config import PredictorConfig, short_name
from seqmoe_jax.forecast.predictor import Predictor
from seqmoe_jax.forecast.tensors import weight_shapes

SHAPE = {"layers": 2, "experts": 4, "active": 2}


def small(model: str) -> PredictorConfig:
    return PredictorConfig(
        model=model, **SHAPE, inputs="activations", d_model=8, blocks=1, head_dim=8, d_state=4, refine_width=8
    )


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A package that ships the predictor of one model, and a user who has installed none."""
    monkeypatch.setenv("SEQMOE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "SHIPPED", tmp_path)
    config = small("owner/Model-7B")
    shapes = nnx.eval_shape(lambda: Predictor(config, rngs=nnx.Rngs(0)).weights())
    store.save(tmp_path / "model-7b", config, jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape), shapes))
    return tmp_path / "model-7b"


@pytest.mark.parametrize(
    "model",
    [
        "owner/Model-7B",
        "someone-else/model-7b",
        "/models/MODEL-7B/",
        "model-7b",
        "/cache/hub/models--owner--Model-7B/snapshots/0123abc",
    ],
)
def test_the_shipped_predictor_is_found_by_the_models_name(shipped, model):
    assert store.find_predictor(model, **SHAPE) == shipped
    assert store.choose_predictor("auto", model, **SHAPE) == shipped


@pytest.mark.parametrize("changed", [{"layers": 3}, {"experts": 8}, {"active": 1}])
def test_a_model_of_that_name_and_another_shape_has_none(shipped, changed):
    assert store.find_predictor("owner/Model-7B", **(SHAPE | changed)) is None


def test_a_model_without_one_has_none(shipped):
    assert store.find_predictor("owner/model-13b", **SHAPE) is None
    assert store.choose_predictor("auto", "owner/model-13b", **SHAPE) is None
    assert store.choose_predictor("none", "owner/model-7b", **SHAPE) is None
    with pytest.raises(PredictorError, match=r"no predictor ships for model 'x' with L=2, E=4, K=2 .*model-7b"):
        store.require_predictor("auto", "x", **SHAPE)
    with pytest.raises(PredictorError, match="needs a model to look up"):
        store.choose_predictor("auto", None, **SHAPE)


def test_a_path_is_taken_at_its_word_and_checked(shipped, tmp_path):
    assert store.choose_predictor(shipped, None, **SHAPE) == shipped
    assert store.choose_predictor(str(shipped), "model-7b", **SHAPE) == shipped
    with pytest.raises(PredictorError, match="is for model 'owner/Model-7B', got 'demo'"):
        store.choose_predictor(shipped, "demo", **SHAPE)
    with pytest.raises(PredictorError, match="is for L=2, E=4, K=2, got L=2, E=8, K=2"):
        store.choose_predictor(shipped, None, **(SHAPE | {"experts": 8}))
    with pytest.raises(PredictorError, match="no predictor here"):
        store.choose_predictor(tmp_path / "nothing", None, **SHAPE)


def test_the_configuration_is_read_without_the_weights(shipped):
    assert store.read_config(shipped) == small("owner/Model-7B")
    path = next(shipped.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(PredictorError, match="not a predictor file"):
        store.read_config(shipped)


def test_short_names():
    assert short_name("demo") == "demo"
    assert short_name("") == ""


WITH_TOKENS = dict(inputs="activations+token", vocabulary=20, token_rows=70, token_width=4, echo=8, blocks=3)


@pytest.mark.parametrize("changes", [{}, {"inputs": "activations"}, {"echo": 0}, {"expand": 3, "refine_width": 24}])
def test_the_shapes_of_a_configuration_are_those_of_its_predictor(changes):
    config = dataclasses.replace(small("m"), **(WITH_TOKENS | changes))
    made = nnx.eval_shape(lambda: Predictor(config, rngs=nnx.Rngs(0)).weights())
    flat = {name: leaf.shape for name, leaf in made.items() if name != "blocks"}
    for index, block in enumerate(made["blocks"]):
        flat |= {f"blocks.{index}.{name}": leaf.shape for name, leaf in block.items()}
    assert weight_shapes(config) == flat


def saved(directory, tensors=None, config=None, **metadata):
    """A predictor of one part with some tensors and some of its configuration changed; None takes one away."""
    made = dataclasses.replace(small("m"), **WITH_TOKENS)
    arrays = {name: np.full(shape, 0.5, np.float32) for name, shape in weight_shapes(made).items()}
    arrays |= {"token_table": np.arange(20, dtype=np.uint16)} | (tensors or {})
    fields = json.dumps(dataclasses.asdict(made) | (config or {}))
    directory.mkdir(exist_ok=True)
    save_file(
        {name: array for name, array in arrays.items() if array is not None},
        directory / "predictor-1.safetensors",
        metadata={"seqmoe_predictor": fields, "parts": "1"} | metadata,
    )
    return directory


def test_what_is_written_like_that_is_read(tmp_path):
    _, weights = store.load(saved(tmp_path / "p", {"popularity": np.zeros((2, 4), np.float32)}))
    assert sorted(weights["blocks"][2]) == sorted(weights["blocks"][0])


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"norm": None}, "expected a tensor 'norm', got none"),
        ({"blocks.2.D": None}, "expected a tensor 'blocks.2.D'"),
        ({"token_table": None}, "expected a tensor 'token_table'"),
        ({"blocks.3.D": np.zeros(1, np.float32)}, "got 'blocks.3.D' too"),
        ({"blocks.x.D": np.zeros(1, np.float32)}, "got 'blocks.x.D' too"),
        ({"x" * 5000: np.zeros(1, np.float32)}, "too"),
        ({"norm": np.ones(9, np.float32)}, "'norm' to be float32 or bfloat16 of shape (8,), got float32 of shape (9,)"),
        ({"norm": np.ones(8, np.float64)}, "got float64"),
        ({"norm": np.full(8, np.nan, np.float32)}, "expected finite numbers, got others in 'norm'"),
        ({"norm": np.full(8, np.inf, np.float32).astype(ml_dtypes.bfloat16)}, "finite"),
        ({"token_table": np.full(20, 70, np.uint16)}, "rows below 70, got 70"),
        ({"token_table": np.full(20, -1, np.int32)}, "rows below 70"),
        ({"token_table": np.zeros(21, np.uint16)}, "of shape (20,)"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_every_tensor_is_what_the_configuration_says(tmp_path, tensors, words):
    with pytest.raises(PredictorError) as caught:
        store.load(saved(tmp_path / "p", tensors))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"layers": 10**9}, "field 'layers' must be an integer from 1 to 512"),
        ({"experts": 1e9}, "field 'experts' must be an integer"),
        ({"d_model": 10**400}, "field 'd_model'"),
        ({"model": ["a"]}, "field 'model' must be text"),
        ({"model": "x" * 10**6}, "field 'model' must be text of"),
        ({"power": float("nan")}, "NaN, which is no JSON number"),
        ({"power": -1}, "field 'power' must be a number from 0.01"),
        ({"head_dim": 7}, "multiple of head_dim"),
        ({"active": 5}, "K <= E"),
        ({"discount": 0}, "in (0, 1)"),
        ({"layers": None}, "field 'layers' is missing"),
        ({"colour": 1}, "unknown field 'colour'"),
        ({"retention": 3}, "expected retention scores"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_every_field_of_the_configuration_is_read_in_range(tmp_path, config, words):
    for read in (store.load, store.read_config):
        with pytest.raises(PredictorError) as caught:
            read(saved(tmp_path / "p", config=config))
        assert words in str(caught.value)


def test_parts_are_of_one_predictor(tmp_path):
    for parts in ("2", "x", "9" * 5000):
        with pytest.raises(PredictorError, match="parts of one predictor, found 1"):
            store.load(saved(tmp_path / "p", parts=parts))
    directory = saved(tmp_path / "p", parts="2")
    other = saved(tmp_path / "q", config={"echo": 9}, parts="2")
    (other / "predictor-1.safetensors").rename(directory / "predictor-2.safetensors")
    with pytest.raises(PredictorError, match="parts of one predictor"):
        store.load(directory)
    for text in ("", "[1]", "[" * 100_000, "{"):
        with pytest.raises(PredictorError, match="the predictor's configuration"):
            store.read_config(saved(tmp_path / "r", seqmoe_predictor=text))


def test_a_pipe_where_a_part_belongs_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "predictor-1.safetensors")
    with pytest.raises(PredictorError, match="got a pipe"):
        store.read_config(tmp_path)
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(PredictorError, match="no predictor here"):
            store.choose_predictor(name, None, **SHAPE)
