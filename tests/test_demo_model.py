"""The model that ships in the package: files, sizes, tokenizer, weights, and what its card's figures say."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import seqmoe_jax
from scripts.demo import export
from scripts.demo.card import LIMIT_BYTES
from scripts.demo.model import Compute, ModelConfig, forward

DEMO = Path(seqmoe_jax.__file__).parent / "demo"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def config():
    return json.loads((DEMO / "config.json").read_text())


@pytest.fixture(scope="module")
def tensors():
    return load_file(DEMO / export.NAME)


@pytest.fixture(scope="module")
def training():
    return json.loads((DEMO / "training.json").read_text())


TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def test_files_and_size():
    sizes = {path.name: path.stat().st_size for path in DEMO.iterdir() if path.is_file()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= set(sizes)
    assert "README.md" in sizes
    assert sum(sizes.values()) < LIMIT_BYTES


def test_config(config):
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["norm_topk_prob"] is True
    assert config["tie_word_embeddings"] is True
    assert config["num_attention_heads"] * config["head_dim"] == config["hidden_size"]
    assert ModelConfig.from_hf(config).hf() == config
    assert config["vocab_size"] == TOKENIZER.get_vocab_size()


def test_weights(config, tensors):
    model = ModelConfig.from_hf(config)
    # Nine dense tensors and three per expert in each layer, the embedding and the last norm; no separate head.
    assert len(tensors) == model.layers * (9 + 3 * model.num_experts) + 2
    assert sum(value.size for value in tensors.values()) == model.parameters()
    assert tensors["model.layers.0.mlp.experts.0.gate_proj.weight"].shape == (model.width, model.hidden)
    assert tensors["model.layers.0.self_attn.k_proj.weight"].shape == (
        model.num_kv_heads * model.head_dim,
        model.hidden,
    )
    for name, value in tensors.items():
        wide = value.astype(np.float32)
        assert np.isfinite(wide).all(), name
        assert wide.std() > 0, name


def test_every_expert_is_used(training, config):
    figures = training["held_out"]
    assert len(figures["usage_entropy"]) == config["num_hidden_layers"]
    assert min(figures["usage_entropy"]) > 0.9
    assert min(figures["least_share"]) > 0.1 / config["num_experts"]


def test_card_has_the_figures_of_the_log(training):
    text = (DEMO / "README.md").read_text(encoding="utf-8")
    for value in training["held_out"]["domains"].values():
        assert f"{value:.3f}" in text
    assert f"{training['log']['tokens'] / 1e6:.0f} M tokens" in text
    assert "CC-BY-4.0" in text
    assert "must not be quoted" in text


@given(st.text())
def test_tokenizer_gives_the_text_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n        return x\n\n\n\t\tif x:\r\n  pass",
        "1234567 + 0.5",
        "naïve 日本語 🤗\u200d\u0000\ufeff e\u0301",
        "".join(map(chr, range(256))),
        "<|im_start|>user\nhi<|im_end|>\n",
    ],
)
def test_tokenizer_examples(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_tokenizer_splits():
    assert TOKENIZER.encode("12345").tokens == ["1", "2", "3", "4", "5"]
    assert len(TOKENIZER.encode("        return").tokens) == 2  # an indentation is one token
    assert [TOKENIZER.token_to_id(token) for token in SPECIAL] == [0, 1, 2]
    assert [TOKENIZER.encode(token).ids for token in SPECIAL] == [[0], [1], [2]]


def test_it_has_learnt_something(config):
    """The loss on a few plain sentences is far below that of a model that knows nothing."""
    import jax

    model = ModelConfig.from_hf(config)
    params = export.read_params(DEMO / export.NAME, model)
    text = (
        "Question: A shop sells pens for 3 dollars each. How much do 4 pens cost?\n"
        "Answer: The pens cost 4 * 3 = 12 dollars.\n#### 12"
    )
    ids = np.array(TOKENIZER.encode(text).ids)
    logits, _ = forward(params, ids[None, :-1], model, Compute(dtype="float32"))
    log_p = np.asarray(jax.nn.log_softmax(logits[0], -1))[np.arange(len(ids) - 1), ids[1:]]
    assert -log_p.mean() < 0.35 * math.log(model.vocab)


@pytest.mark.slow
def test_same_logits_in_transformers(config):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = ModelConfig.from_hf(config)
    params = export.read_params(DEMO / export.NAME, model)
    ids = np.array([TOKENIZER.encode("def add(a, b):\n    return a + b\n\n\nOnce upon a time").ids])
    logits, _ = forward(params, ids, model, Compute(dtype="float32"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(np.asarray(logits), expected, atol=2e-4)


def test_chat_template():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(text)["input_ids"] == TOKENIZER.encode(text).ids
