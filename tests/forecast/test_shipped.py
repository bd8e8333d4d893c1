"""The predictors that ship: found, small, and far better than the baselines on sequences they never saw."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from seqmoe_jax.checkpoints.resolve import read_config, resolve_model
from seqmoe_jax.forecast import inference, store
from seqmoe_jax.forecast.data import prepare, window
from seqmoe_jax.forecast.evaluation.cost import cost
from seqmoe_jax.forecast.evaluation.export import forecasts_of
from seqmoe_jax.forecast.heads import membership
from seqmoe_jax.forecast.predictor import Predictor
from seqmoe_jax.models.families import spec_from_config
from seqmoe_jax.traces.format import read_trace
from seqmoe_jax.traces.prompts import read_prompts

ROOT = Path(__file__).parents[2]
LIMIT = {"demo": 4_000_000}


def test_the_demo_has_a_predictor_of_its_shape():
    spec = spec_from_config(read_config(resolve_model("demo")))
    directory = store.find_predictor(
        "demo", layers=len(spec.moe_layers), experts=spec.moe.num_experts, active=spec.moe.top_k
    )
    assert directory is not None
    assert sum(path.stat().st_size for path in directory.iterdir()) < LIMIT["demo"]
    config = store.read_config(directory)
    assert (config.model, config.vocabulary) == ("demo", spec.vocab)
    said = json.loads((directory / store.EVALUATION).read_text())
    assert said["cost"] == cost(config)._asdict()
    rows = said["splits"]["test"]["predictors"]
    assert rows["activations+token"]["recall_at"]["7"] > rows["first-order"]["recall_at"]["7"] + 0.2


def test_it_forecasts_sequences_it_never_saw():
    """Two of the 65 sequences of its evaluation, 143 decoded steps: .796 here, .862 over all; first order .566."""
    trace = read_trace(ROOT / "tests" / "data" / "demo_excerpt.npz")
    directory = store.require_predictor("auto", trace.model, **trace.sizes)
    said = forecasts_of(*store.load(directory), trace, rollout=0)
    likeliest = np.argsort(-said.next.astype(np.float32), axis=2)[:, :, :7]
    found = (trace.ids[..., :, None] == likeliest[..., None, :]).any(-1)
    decoded = trace.decoded()
    assert found[decoded].mean() > 0.75
    above = np.argsort(-said.refined.astype(np.float32), axis=2)[:, :, :7]
    again = (trace.ids[..., :, None] == above[..., None, :]).any(-1)
    upper = slice(said.trigger + 1, None)
    assert again[decoded][:, upper].mean() > found[decoded][:, upper].mean()
    assert abs(said.next[decoded].astype(np.float32).sum(2).mean() - trace.active) < 0.2


def test_the_prompts_it_was_trained_on_are_there():
    prompts = read_prompts(ROOT / "scripts" / "demo" / "trace_prompts.jsonl")
    assert {split: sum(p.split == split for p in prompts) for split in ("train", "test")} == {"train": 368, "test": 65}
    assert {prompt.temperature for prompt in prompts} == {0.0, 0.8}


def test_a_file_of_a_predictor_loads_into_the_flax_module():
    """As it is, with what stands beside the weights; the module then forecasts what the decode step would."""
    trace = read_trace(ROOT / "tests" / "data" / "demo_excerpt.npz")
    directory = store.require_predictor("auto", trace.model, **trace.sizes)
    config, weights = store.load(directory)
    predictor = Predictor(config, rngs=nnx.Rngs(0))
    predictor.load(weights)
    steps = prepare(trace, config, weights["token_table"])
    batch = window(steps, steps.starts[:1], steps.starts[:1] + 12, 12, config)
    said = jax.nn.sigmoid(membership(weights, predictor(batch.inputs).next))
    state, step = inference.init_state(config, 1), jax.jit(inference.step, static_argnums=0)
    for t in range(12):
        token = jnp.asarray(trace.tok[steps.starts[0] + t])[None]
        state, following, _ = step(config, weights, state, batch.inputs.features[:, t], token)
        np.testing.assert_allclose(following[0], said[0, t], rtol=2e-3, atol=2e-4)
