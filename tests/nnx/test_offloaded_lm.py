"""A model of ours as an NNX module gives an engine's tokens, in a loop that somebody else writes."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import seqmoe_jax as sm
from seqmoe_jax.loading import random_model
from seqmoe_jax.testing import tiny_config, tiny_engine, tiny_model

pytestmark = pytest.mark.slow
PROMPT = list(b"an expert is")
OSS = {
    **tiny_config(model_type="gpt_oss", num_local_experts=8, sliding_window=4, attention_bias=True),
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


def wanted(count=8):
    with tiny_engine(residency=1.0) as engine:
        return engine.generate(PROMPT, max_new_tokens=count).tokens


@partial(nnx.jit, donate_argnums=(0, 3))
def step(model, tokens, positions, cache):
    logits, cache = model(tokens, positions, cache)
    return logits[:, -1].argmax(-1)[:, None], cache


def greedy(model, prompt, count=8):
    cache, token, at, out = model.init_cache(1, 64), jnp.array([prompt]), 0, []
    for _ in range(count):
        length = token.shape[1]
        token, cache = step(model, token, (at + jnp.arange(length))[None], cache)
        at += length
        out.append(int(token[0, 0]))
    assert int(cache["length"][0]) == at
    return out


@pytest.mark.parametrize("residency", ["least", 0.4, 1.0])
def test_tokens_are_those_of_an_engine(residency):
    model = sm.nnx.OffloadedLM(tiny_model(), residency=residency)
    assert greedy(model, PROMPT) == wanted()
    assert (model.slots.hit_rate == 1.0) == (residency == 1.0)


def test_forward_takes_rows_that_are_padded_on_the_left():
    model = sm.nnx.OffloadedLM(tiny_model(), residency=0.4)
    other = PROMPT[:5]
    alone = [greedy(model, PROMPT), greedy(model, other)]
    cache = model.init_cache(2, 64)
    tokens, out = jnp.array([PROMPT, [0] * (len(PROMPT) - len(other)) + other]), []
    for _ in range(8):
        logits, cache = sm.nnx.forward(model, cache, tokens, 0)
        tokens = logits.argmax(-1)[:, None]
        out.append(np.asarray(tokens[:, 0]))
    assert np.stack(out, 1).tolist() == alone
    assert cache["length"].tolist() == [len(PROMPT) + 7, 5 + 7]


def test_windows_and_sinks_go_along():
    model = sm.nnx.OffloadedLM(random_model(OSS), residency=0.4)
    full = sm.nnx.OffloadedLM(random_model(OSS), residency=1.0)
    assert greedy(model, PROMPT) == greedy(full, PROMPT)


def test_a_checkpoint_is_read(no_type_checks):
    model = sm.nnx.OffloadedLM.from_pretrained("demo", residency=0.3)
    out = sm.generate("demo", "def add(", max_new_tokens=8)
    with sm.load("demo") as engine:
        prompt = engine.request("def add(").tokens
    assert greedy(model, prompt) == out.tokens
    for arguments, error, said in [
        (dict(cache_size=10**9), sm.ConfigError, "cache_size must be from 1"),
        (dict(cache_size=0), sm.ConfigError, "cache_size must be from 1"),
    ]:
        with pytest.raises(error, match=said):
            model.init_cache(1, **arguments)
    with pytest.raises(sm.ConfigError, match="one of lru, lfu"):
        sm.nnx.OffloadedLM(tiny_model(), policy="full")
