"""Every family gives the tokens and logits of transformers in float32, with most experts outside the slots."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from checkpoints import EXPERTS, FAMILIES, NEW, PROMPT, make, make_mxfp4
from published_v4 import make_v4
from safetensors.torch import load_file, save_file

from seqmoe_jax.decode.state import StepOutput
from seqmoe_jax.decode.step import forward
from seqmoe_jax.decode.token import next_token
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.loading import load_model
from seqmoe_jax.options import EngineOptions
from seqmoe_jax.programs import Programs


@partial(jax.jit, static_argnames="config", donate_argnums=(0, 1))
def step_with_logits(sequences, offload, weights, pools, sampling, eos_token_ids, *unused, config):
    """A decode step that also gives its logits. Not used: what engines and predictors need, None here."""
    assert not any(unused)
    logits, sequences, offload, routed = forward(sequences, offload, weights, pools, config=config)
    sequences, token, end = next_token(
        logits, sequences, sampling, eos_token_ids, sequences.position + 1, greedily=config.greedy, vocab=config.vocab
    )
    return sequences, offload, StepOutput.pack(token, end, routed.counts), logits


class RecordingPrograms(Programs):
    """Programs whose decode step keeps its logits, [1, V] each."""

    def prepare(self, key, what, function, *args, **static):
        super().prepare(key, what, step_with_logits if key[0] == "step" else function, *args, **static)

    def get(self, key, what, function, *args, **static):
        if key[0] != "step":
            return super().get(key, what, function, *args, **static)
        program = super().get(key, what, step_with_logits, *args, **static)
        self.logits = []

        def recording(*args):
            *state, logits = program(*args)
            self.logits.append(logits)
            return state

        return recording


# As published, where that is another format than what transformers writes.
PUBLISHED = {"gpt_oss-mxfp4": make_mxfp4, "deepseek_v4": make_v4}


@pytest.fixture(scope="module", params=sorted(FAMILIES.keys() | PUBLISHED.keys()))
def case(request, tmp_path_factory):
    """(our model, the reference)."""
    directory = tmp_path_factory.mktemp(request.param)
    reference = PUBLISHED[request.param](directory) if request.param in PUBLISHED else make(request.param, directory)
    return load_model(reference.directory)[0], reference


@pytest.fixture(autouse=True)
def chunks_shorter_than_the_prompt(monkeypatch):
    monkeypatch.setattr("seqmoe_jax.prefill.lengths.CHUNK", 32)


def generate(engine):
    return [event.token for event in engine.run([PROMPT], max_new_tokens=NEW)]


def test_tokens_and_logits_are_those_of_transformers(case):
    model, reference = case
    engine = TokenEngine(model, EngineOptions(policy="lru", residency=0.3))
    engine.programs = RecordingPrograms()
    assert generate(engine) == reference.tokens[len(PROMPT) :]
    assert engine.last_stats.hit_rate < 1
    expected = reference.logits[len(PROMPT) : -1]
    np.testing.assert_allclose(np.concatenate(engine.programs.logits)[: len(expected)], expected, atol=1e-4)


@pytest.mark.slow  # one more compilation of everything for every family
def test_prompts_of_different_lengths_leave_each_other_alone(case):
    model, reference = case
    engine = TokenEngine(model, EngineOptions(policy="lru", residency=0.3, max_batch=2))
    events = list(engine.run([PROMPT, PROMPT[:19]], max_new_tokens=NEW))
    assert [event.token for event in events if event.sequence == 0] == reference.tokens[len(PROMPT) :]
    short = [event.token for event in events if event.sequence == 1]
    assert [event.token for event in engine.run([PROMPT[:19]], max_new_tokens=NEW)] == short


@pytest.mark.slow  # one more compilation of everything for every family
def test_tokens_at_full_load_are_those_of_transformers(case):
    model, reference = case
    engine = TokenEngine(model, EngineOptions(policy="full"))
    assert generate(engine) == reference.tokens[len(PROMPT) :]
    assert engine.last_stats.hit_rate == 1


@pytest.mark.slow  # programs of another batch
@pytest.mark.parametrize("case", ["gpt_oss-mxfp4", "mixtral"], indirect=True)
def test_sequences_of_different_lengths_cross_the_window_together(case):
    model, reference = case
    engine = TokenEngine(model, EngineOptions(policy="lru", residency=0.3, max_batch=2))
    tokens = [[], []]
    for event in engine.run([PROMPT[:7], PROMPT], max_new_tokens=NEW):
        tokens[event.sequence].append(event.token)
    assert tokens[1] == reference.tokens[len(PROMPT) :]
    alone = TokenEngine(model, EngineOptions(policy="lru", residency=0.3))
    assert tokens[0] == [event.token for event in alone.run([PROMPT[:7]], max_new_tokens=NEW)]


def test_the_published_layout_of_qwen3_5_gives_the_same_weights(tmp_path, caplog):
    """Text part nested in the config and below `model.language_model`, experts fused, vision and prediction beside."""
    reference = make("qwen3_5_moe_text", tmp_path / "saved")
    tensors, published = load_file(reference.directory / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            published[name.replace("model.", "model.language_model.", 1)] = tensor
    for layer in range(2):
        theirs, ours = f"model.layers.{layer}.mlp.experts.", f"model.language_model.layers.{layer}.mlp.experts."
        part = {
            kind: torch.stack([tensors[f"{theirs}{expert}.{kind}_proj.weight"] for expert in range(EXPERTS)])
            for kind in ("gate", "up", "down")
        }
        published[ours + "gate_up_proj"] = torch.cat([part["gate"], part["up"]], dim=1)
        published[ours + "down_proj"] = part["down"]
    published |= {"mtp.fc.weight": torch.zeros(2), "model.visual.patch_embed.proj.weight": torch.zeros(2)}
    save_file(published, tmp_path / "model.safetensors")
    text = json.loads((reference.directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": text}))
    with caplog.at_level("INFO", "seqmoe_jax"):
        model, saved = load_model(tmp_path)[0], load_model(reference.directory)[0]
    assert "left out *visual.* (1 tensors), mtp.* (1 tensors)" in caplog.text
    assert model.spec == saved.spec
    both = (jax.tree.leaves((loaded.weights, loaded.pools)) for loaded in (model, saved))
    assert all(np.array_equal(ours, expected) for ours, expected in zip(*both, strict=True))


def test_deepseek_v4_as_transformers_saves_it_has_the_same_weights(tmp_path):
    published = make_v4(tmp_path)
    model, saved = load_model(published.directory)[0], load_model(tmp_path / "dequantised")[0]
    stored = {"expert_dtype": model.spec.expert_dtype, "quantization": model.spec.quantization}
    assert model.spec == replace(saved.spec, **stored)
    both = (jax.tree.leaves(loaded.weights) for loaded in (model, saved))
    assert all(np.array_equal(ours, expected) for ours, expected in zip(*both, strict=True))
