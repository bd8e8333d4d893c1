"""A sampler of the shape that trainers of Tunix take: what it returns, and how it follows a training."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import seqmoe_jax as sm
from tests.zoo.models import Qwen3, TunixConfig, greedy

pytestmark = pytest.mark.slow
PROMPTS = [[5, 17, 3, 80], [44, 9]]


def tunix(seed, **changes):
    return Qwen3(replace(TunixConfig(num_layers=2), **changes), rngs=nnx.Rngs(seed))


@pytest.fixture(scope="module")
def sampler():
    return sm.nnx.Sampler(tunix(1), residency=0.4)


def test_logits_and_experts_are_those_of_the_module(sampler):
    module = tunix(1)
    out = sampler(PROMPTS, 5, return_routed_experts=True)
    assert [tokens.tolist() for tokens in out.tokens] == [greedy(module, prompt, 5) for prompt in PROMPTS]
    whole = [*PROMPTS[0], *out.tokens[0].tolist()]
    wanted = module.logits(jnp.array([whole]))[0]
    np.testing.assert_allclose(out.logits[0], wanted[3:-1], rtol=1e-3, atol=1e-4)
    logprobs = jax.nn.log_softmax(wanted[3:-1])[np.arange(5), np.array(whole[4:])]
    np.testing.assert_allclose(out.logprobs[0], logprobs, rtol=1e-3, atol=1e-4)
    assert [experts.shape for experts in out.routed_experts] == [(9, 2, 2), (7, 2, 2)]
    assert out.padded_prompt_tokens.tolist() == [[5, 17, 3, 80], [0, 0, 44, 9]]
    assert sampler.transformer_state is not None


def test_new_weights_need_no_new_program(sampler):
    engine = sampler.engine.token_engine
    sampler(PROMPTS, 5, return_routed_experts=True)
    compiled, places = engine.programs.compile_s, [pool.unsafe_buffer_pointer() for pool in engine.model.pools]
    trained = tunix(2)
    sampler.update_params(nnx.state(trained))
    np.testing.assert_array_equal(sampler.transformer.lm_head.w[...], trained.lm_head.w[...])
    assert not (np.asarray(engine.offloading.state.cache.tables.key_of_slot) >= 0).any()
    out = sampler(PROMPTS, 5, return_routed_experts=True)
    assert [tokens.tolist() for tokens in out.tokens] == [greedy(trained, prompt, 5) for prompt in PROMPTS]
    assert engine.programs.compile_s == compiled
    assert [pool.unsafe_buffer_pointer() for pool in engine.model.pools] == places
    sampler.update_params(tunix(1))
    assert sampler(PROMPTS[0:1], 5).tokens[0].tolist() == greedy(tunix(1), PROMPTS[0], 5)


def test_samples_differ_and_are_padded(sampler, no_type_checks):
    out = sampler(PROMPTS, 4, temperature=5.0, seed=3, multi_sampling=2, return_logits=False, pad_output=True,
                  max_prompt_length=6)  # fmt: skip
    assert out.tokens.shape == (4, 4)
    assert out.tokens[0].tolist() != out.tokens[1].tolist()
    assert out.padded_prompt_tokens.shape == (4, 6)
    assert out.logits is out.logprobs is out.routed_experts is None
    for arguments, error, said in [
        (dict(beam_size=4), sm.ConfigError, "one by one"),
        (dict(max_prompt_length=3), sm.PromptError, "prompt 0 has 4 tokens, max_prompt_length is 3"),
        (dict(multi_sampling=0), sm.ConfigError, "at least 1"),
        (dict(temperature=-1), sm.ConfigError, "temperature"),
    ]:
        with pytest.raises(error, match=said):
            sampler(PROMPTS, 4, **arguments)
    with pytest.raises(sm.CheckpointError, match="same model"):
        sampler.update_params(tunix(1, num_experts=4))
    with pytest.raises(sm.PromptError, match="no tokenizer"):
        sampler.tokenize("abc")
