"""Which predictor a choice means: by the model's name, by path, or none."""

from __future__ import annotations

import jax
import pytest
from flax import nnx

from seqmoe_jax.errors import PredictorError
from seqmoe_jax.forecast import store
from seqmoe_jax.forecast.config import PredictorConfig, short_name
from seqmoe_jax.forecast.predictor import Predictor

SHAPE = {"layers": 2, "experts": 4, "active": 2}


def small(model: str) -> PredictorConfig:
    return PredictorConfig(
        model=model, **SHAPE, inputs="activations", d_model=8, blocks=1, head_dim=8, d_state=4, refine_width=8
    )


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A package that ships the predictor of one model."""
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
