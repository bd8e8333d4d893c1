"""Logits that are no numbers end the sequence that they are of, with an error, and no other."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from seqmoe_jax.api import Engine
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.errors import NonFiniteError
from seqmoe_jax.options import EngineOptions, SamplingConfig
from seqmoe_jax.testing import tiny_model, untrained_predictor
from seqmoe_jax.text.tokenizers import ByteTokenizer

BAD = ord("!")  # whose embedding is no number
PROMPTS = ["a good one", "a bad one!"]


@pytest.fixture(scope="module", params=[np.nan, np.inf], ids=str)
def model(request):
    sound = tiny_model(num_hidden_layers=2, mlp_only_layers=[])
    embed = sound.weights.embed.at[BAD].set(request.param)
    return dataclasses.replace(sound, weights=sound.weights._replace(embed=embed))


def engine_of(model, **options):
    chosen = EngineOptions(max_batch=2, residency=0.6, **options)
    token_engine = TokenEngine(model, chosen, predictor=untrained_predictor(model))
    return Engine(token_engine, ByteTokenizer(vocab=256))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_it_ends_that_sequence_and_no_other(model, temperature):
    with engine_of(model) as engine:
        sound = engine.generate(PROMPTS[0], max_new_tokens=6, temperature=temperature, seed=3)
        for _ in range(2):  # and nothing of it stays behind
            good, bad = engine.generate(PROMPTS, max_new_tokens=6, temperature=temperature, seed=3)
            assert (good.tokens, good.error) == (sound.tokens, None)
            assert (bad.tokens, bad.text, bad.finish_reason) == ([], "", "error")
            assert "prompt 1: expected finite logits for new token 0" in bad.error
        assert engine.generate(PROMPTS[0], max_new_tokens=6, temperature=temperature, seed=3).tokens == sound.tokens
        forecast = engine.token_engine.offloading.state.forecast
        assert all(bool(jnp.isfinite(part).all()) for part in forecast)


def test_a_single_prompt_raises(model):
    with engine_of(model) as engine:
        with pytest.raises(NonFiniteError, match="expected finite logits"):
            engine.generate(PROMPTS[1], max_new_tokens=6)
        with pytest.raises(NonFiniteError):
            list(engine.stream(PROMPTS[1], max_new_tokens=6))
        assert engine.generate(PROMPTS[0], max_new_tokens=3).error is None


def test_a_token_in_the_middle_of_decoding_ends_it_there(model):
    """The bad token is forced upon the second sequence as its third new one: by a head that can say nothing else."""
    head = model.weights.head.at[BAD].set(0.0)
    steered = dataclasses.replace(model, weights=model.weights._replace(head=head))
    with engine_of(steered) as engine:
        events = list(engine.token_engine.run([[1, 2, 3]], max_new_tokens=4, sampling=SamplingConfig()))
        assert all(event.finite for event in events)
        events = list(engine.token_engine.run([[1, BAD, 3]], max_new_tokens=4, sampling=SamplingConfig()))
        assert [event.finite for event in events] == [False]
