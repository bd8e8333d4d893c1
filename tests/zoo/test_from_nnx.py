"""A Flax NNX model becomes an engine: its own greedy tokens, its arrays given away layer by layer, its own paths in
errors."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import seqmoe_jax as sm
from seqmoe_jax.text import tokenizer_of
from seqmoe_jax.zoo import load
from seqmoe_jax.zoo.layouts import LAYOUTS
from tests.zoo.models import (
    FilesConfig,
    GptOssForCausalLM,
    MixtralForCausalLM,
    Qwen3,
    TunixConfig,
    causal,
    greedy,
)

PROMPT = [5, 17, 3, 80, 44, 9]
OSS = FilesConfig(head_dim=16, attention_bias=True, sliding_window=4, rope_theta=150_000.0)
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": OSS.rope_theta}}
STYLES = {
    "easydel": (lambda: MixtralForCausalLM(FilesConfig(), rngs=nnx.Rngs(3)), {}),
    "bonsai": (lambda: GptOssForCausalLM(OSS, rngs=nnx.Rngs(4)), {"config": PLAIN}),
}


def tunix(**changes):
    return Qwen3(replace(TunixConfig(), **changes), rngs=nnx.Rngs(1))


@pytest.fixture(scope="module")
def engine():
    with sm.from_nnx(tunix(), residency=0.4) as engine:
        yield engine


@pytest.fixture(scope="module")
def wanted():
    return greedy(tunix(), PROMPT, 12)


def test_greedy_tokens_are_those_of_the_module(engine, wanted):
    assert engine.token_engine.plan.slots < engine.token_engine.model.spec.num_keys
    assert engine.generate(PROMPT, max_new_tokens=12).tokens == wanted


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_so_they_are_for_other_zoos_and_families(style):
    make, options = STYLES[style]
    with sm.from_nnx(make(), style, residency=0.4, **options) as engine:
        assert engine.generate(PROMPT, max_new_tokens=12).tokens == greedy(make(), PROMPT, 12)


@pytest.mark.slow
def test_bfloat16_stays_bfloat16():
    make = lambda: tunix(dtype=jnp.bfloat16, use_tied_embedding=True)  # noqa: E731
    module = make()
    with sm.from_nnx(make(), residency=0.4) as engine:
        model = engine.token_engine.model
        assert {model.spec.expert_layout.dtype, model.weights.embed.dtype} == {jnp.dtype(jnp.bfloat16)}
        tokens = engine.generate(PROMPT, max_new_tokens=12).tokens
    # Its sums are taken in another order: what it takes must be as good as the module's best, to bfloat16.
    sequence = jnp.array([[*PROMPT, *tokens]])
    logits = np.asarray(nnx.jit(lambda module, tokens: module.logits(tokens))(module, sequence))[
        0, len(PROMPT) - 1 : -1
    ]
    lost = logits.max(-1) - logits[np.arange(len(tokens)), tokens]
    assert lost.max() <= 2**-6 * np.abs(logits).max()


def test_the_module_gives_its_arrays_away_layer_by_layer(monkeypatch):
    module, held = tunix(), []
    whole, build = sum(x.nbytes for x in jax.tree.leaves(nnx.state(module))), load.build_pool

    def seen(*args, **kwargs):
        held.append(sum(x.nbytes for x in jax.tree.leaves(nnx.state(module)) if isinstance(x, jax.Array)))
        return build(*args, **kwargs)

    monkeypatch.setattr(load, "build_pool", seen)
    layer = (
        sum(x.nbytes for x in jax.tree.leaves(nnx.state(module.layers[0].mlp)))
        - module.layers[0].mlp.router.kernel.nbytes
    )
    sm.from_nnx(module, residency=0.4).close()
    assert held == [3 * layer, 2 * layer, layer]  # the dense part went first
    assert whole > 3 * layer
    assert not [x for x in jax.tree.leaves(nnx.state(module)) if isinstance(x, jax.Array)]
    with pytest.raises(sm.CheckpointError, match=r"embedder\.input_embedding: .* given away before"):
        sm.from_nnx(module)


def dense(engine):
    return jax.tree.map(np.asarray, engine.token_engine.model.weights)


def test_what_is_not_released_stays_whole(engine):
    module = tunix()
    before = jax.tree.map(np.array, nnx.state(module))
    with sm.from_nnx(module, residency=0.4, release=False) as other:
        jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, nnx.state(module)))
        # A training step that donates its state does not take the engine's weights with it.
        jax.tree.map(lambda x: x.delete(), nnx.state(module))
        jax.tree.map(np.testing.assert_array_equal, dense(other), dense(engine))


def test_a_mapping_is_a_layout(engine):
    paths = {**LAYOUTS["tunix"].paths, "lm_head": "out.rows.T"}

    class Renamed(Qwen3):
        def __init__(self, config, *, rngs):
            super().__init__(config, rngs=rngs)
            self.out = nnx.Module()
            self.out.rows = nnx.Param(self.lm_head.w[...].T)
            del self.lm_head

    config = {"model_type": "qwen3_moe", "norm_topk_prob": True, "max_position_embeddings": 512, "num_hidden_layers": 3,
              "hidden_size": 32, "moe_intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
              "rope_theta": 1e6}  # fmt: skip
    module = Renamed(TunixConfig(), rngs=nnx.Rngs(1))
    with sm.from_nnx(module, paths, config=config, residency=0.4) as other:
        jax.tree.map(np.testing.assert_array_equal, dense(other), dense(engine))
        for ours, theirs in zip(other.token_engine.model.pools, engine.token_engine.model.pools, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_arrays_that_do_not_fit_are_named_by_their_paths():
    module = tunix()
    del module.layers[1].attn.k_norm
    module.layers[2].mlp.up_proj.set_value(jnp.zeros((8, 16, 32)))
    module.layers[0].mlp.router.extra = nnx.Param(jnp.zeros(3))
    module.final_norm.w.set_value(jnp.zeros(32, jnp.int32))
    with pytest.raises(sm.CheckpointError) as error:
        sm.from_nnx(module)
    assert "1 missing (layers.1.attn.k_norm.w)" in str(error.value)
    assert "final_norm.w of int32" in str(error.value)
    assert "layers.2.mlp.up_proj [8, 16, 32] for [8, 32, 16] [in, out]" in str(error.value)
    assert "1 unexpected (layers.0.mlp.router.extra)" in str(error.value)
    assert isinstance(module.layers[0].mlp.gate_proj.get_value(), jax.Array)  # nothing was taken


def test_faults_come_before_anything_is_taken(tmp_path, no_type_checks):
    module = tunix()
    for arguments, error, said in [
        (dict(residency=0.01), sm.ResidencyError, "least"),
        (dict(predictor=tmp_path / "none"), sm.PredictorError, "none"),
        (dict(layout="maxtext"), sm.ConfigError, "'tunix', 'easydel', 'bonsai' or a mapping"),
        (dict(layout="easydel"), sm.ConfigError, "model_type"),
        (dict(layout={"embed": 3}), sm.ConfigError, "path as text"),
        (dict(layout={"embed": "embedder.input_embedding.T"}, config={"model_type": "qwen3_moe"}), sm.ConfigError,
         "Qwen3, its configuration as a config.json"),
        (dict(config={"num_experts": 9}), sm.CheckpointError, r"mlp.router.kernel \[32, 8\] for \[32, 9\]"),
        (dict(tokenizer=3), sm.ConfigError, "encode and decode"),
        (dict(eos_token_ids=[96]), sm.ConfigError, "below 96"),
    ]:  # fmt: skip
        with pytest.raises(error, match=said):
            sm.from_nnx(module, **arguments)
    with pytest.raises(sm.ConfigError, match="Flax NNX module, got dict"):
        sm.from_nnx({})
    assert len(greedy(module, PROMPT, 1)) == 1
    mixed = tunix()
    mixed.layers[1].mlp.down_proj.set_value(mixed.layers[1].mlp.down_proj[...].astype(jnp.bfloat16))
    with pytest.raises(sm.CheckpointError, match=r"one dtype, got .* of float32 and layers.1.mlp.down_proj of bf"):
        sm.from_nnx(mixed)


@pytest.mark.slow
def test_tunix_itself_is_a_tunix_model():
    tunix = pytest.importorskip("tunix.models.qwen3.model")
    config = tunix.ModelConfig(
        num_layers=2, vocab_size=96, embed_dim=32, hidden_dim=16, num_heads=4, head_dim=16, num_kv_heads=2,
        rope_theta=1_000_000, norm_eps=1e-6, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip

    class Whole(tunix.Qwen3):
        def logits(self, tokens):
            at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            return self(tokens, at, None, causal(tokens))[0]

    make = lambda: Whole(config, rngs=nnx.Rngs(5))  # noqa: E731
    with sm.from_nnx(make(), "tunix", residency=0.4) as engine:
        assert engine.generate(PROMPT, max_new_tokens=12).tokens == greedy(make(), PROMPT, 12)


class Letters:
    """A tokenizer as zoos have them: two functions."""

    def encode(self, text):
        return np.array([ord(letter) % 96 for letter in text])

    def decode(self, tokens):
        return "".join(chr(token) for token in tokens)


def test_token_ids_need_no_tokenizer_and_text_does(engine, wanted):
    one = engine.generate(np.array(PROMPT), max_new_tokens=4)
    assert (one.text, one.tokens) == ("", wanted[:4])
    assert list(engine.stream_tokens(PROMPT, max_new_tokens=4)) == wanted[:4]
    (again,) = engine.generate([jnp.array(PROMPT)], max_new_tokens=4)
    assert again.tokens == wanted[:4]
    with pytest.raises(sm.PromptError, match=r"no tokenizer: give token ids"):
        engine.generate("abc")
    with pytest.raises(sm.PromptError, match="stop strings need a tokenizer"):
        engine.generate(PROMPT, stop=["a"])


def test_a_tokenizer_is_any_object_with_two_functions(engine, wanted, monkeypatch):
    monkeypatch.setattr(engine, "tokenizer", tokenizer_of(Letters(), "", vocab=96))
    monkeypatch.setattr(engine, "eos_token_ids", (wanted[2],))
    out = engine.generate("".join(map(chr, PROMPT)), max_new_tokens=4)
    assert (out.tokens, out.finish_reason) == (wanted[:3], "stop")
    assert out.text == "".join(map(chr, wanted[:2]))
