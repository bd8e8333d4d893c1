"""The pieces of the demo model's training: router, optimiser, windows, hold-out, export."""

import json
import lzma

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.demo import data, export
from scripts.demo.model import Compute, ModelConfig, init_params, route
from scripts.demo.optimizer import MATRICES, OptimizerConfig, make_optimizer
from scripts.demo.prepare_corpus import as_chat, hold_out, split_long, train_tokenizer
from scripts.demo.sources import SOURCES, read_attributions
from scripts.demo.train import build_chunk, schedule

TINY = ModelConfig(
    vocab=64, layers=2, hidden=16, num_heads=2, num_kv_heads=1, head_dim=8, num_experts=4, top_k=2, width=8
)


def test_router_is_softmax_then_top_k_then_renormalise():
    logits = jax.random.normal(jax.random.key(0), (50, 8)) * 3
    weights, chosen, statistics = route(logits, 3)
    values, ids = jax.lax.top_k(jax.nn.softmax(logits, -1), 3)
    expected = np.zeros((50, 8), np.float32)
    np.put_along_axis(expected, np.asarray(ids), np.asarray(values / values.sum(-1, keepdims=True)), -1)
    np.testing.assert_allclose(weights, expected, atol=1e-6)
    assert (np.asarray(chosen).sum(-1) == 3).all()
    assert float(statistics.share.sum()) == pytest.approx(3, abs=1e-5)


def test_router_takes_the_lowest_index_among_equals():
    _, chosen, _ = route(jnp.zeros((1, 5)), 2)
    assert np.asarray(chosen)[0].tolist() == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("shape", [(3, 16, 8), (2, 2, 8, 32)])
def test_muon_orthogonalises_every_matrix_of_a_stack(shape):
    opt = make_optimizer(OptimizerConfig(matrix_decay=0.0))
    params = {"q": jnp.zeros(shape)}
    updates, _ = opt.update({"q": jax.random.normal(jax.random.key(1), shape)}, opt.init(params), params)
    singular = np.linalg.svd(np.asarray(updates["q"]), compute_uv=False) / (0.2 * max(shape[-2:]) ** 0.5)
    assert singular.max() < 1.3
    assert singular.min() > 0.5


def test_norms_are_not_decayed():
    opt = make_optimizer(OptimizerConfig())
    params = {name: jnp.ones((2, 4, 4)) for name in (*MATRICES, "embed", "q_norm")}
    updates, _ = opt.update(jax.tree.map(jnp.zeros_like, params), opt.init(params), params)
    assert {name for name, update in updates.items() if (update < 0).all()} == {*MATRICES, "embed"}


def test_a_broken_gradient_is_skipped():
    params = {name: jnp.ones(shape) for name, shape in (("q", (2, 4, 4)), ("router", (2, 4)))}
    opt = make_optimizer(OptimizerConfig())
    state = opt.init(params)
    updates, after = jax.jit(opt.update)({n: jnp.full_like(v, jnp.nan) for n, v in params.items()}, state, params)
    assert not any(update.any() for update in updates.values())
    for new, old in zip(jax.tree.leaves(after.inner_state), jax.tree.leaves(state.inner_state), strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_a_few_steps_learn_a_text_of_few_words(name, shards):
    opt = make_optimizer(OptimizerConfig(name=name))
    config = ModelConfig(**(vars(TINY) | {"vocab": 262}))
    chunk = build_chunk(config, Compute(dtype="float32"), opt, batch=8, length=32, steps=10)
    params, text = init_params(config, jax.random.key(0)), data.load_training(shards, 33)
    state = params, opt.init(params)
    losses = []
    for index in range(4):
        state, figures = chunk(state, text, jax.random.key(index), jnp.float32(1e-2))
        losses.append(float(figures["loss"]))
    assert losses[-1] < 0.8 * losses[0]


def test_schedule_ends_low():
    assert schedule(0.02, 1.0) == pytest.approx(1.0)
    assert schedule(1.0, 1.0) == pytest.approx(0.01)
    assert schedule(1.5, 1.0) == pytest.approx(0.01)
    assert 0 < schedule(0.0, 1.0) < 0.1


def test_export_round_trip(tmp_path):
    random = np.random.default_rng(0)
    params = {name: random.standard_normal(shape, np.float32) for name, shape in TINY.shapes().items()}
    (tmp_path / "m.safetensors").write_bytes(export.safetensors_bytes(params))
    back = export.read_params(tmp_path / "m.safetensors", TINY)
    assert back.keys() == params.keys()
    for name, value in params.items():
        np.testing.assert_array_equal(back[name], value.astype(export.BF16).astype(np.float32), name)
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(str(tmp_path / "m.safetensors"), "numpy") as file:
        assert len(list(file.keys())) == 2 * (9 + 3 * 4) + 2


def test_parts_are_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "PART_BYTES", 10)
    export.write_parts(b"0123456789abcdefghijklm", tmp_path, steps=3)
    assert export.join_parts(tmp_path) == b"0123456789abcdefghijklm"
    (tmp_path / f"{export.NAME}.part1").write_bytes(b"ABCDEFGHIJ")
    with pytest.raises(ValueError, match="checksum"):
        export.join_parts(tmp_path)


def test_documents_of_one_question_are_held_out_together():
    texts = [f"Question: number {i % 50}?\nAnswer: {i}" for i in range(200)]
    held = hold_out(texts, 0.1)
    assert any(held)
    assert all(held[i] == held[i % 50] for i in range(200))
    assert sum(hold_out(["only", "two"], 0.0)) == 1


def test_long_documents_are_cut_without_loss():
    text = "\n\n".join("word " * 300 for _ in range(40))
    parts = list(split_long(text))
    assert len(parts) > 1
    assert "".join(parts) == text


def test_as_chat():
    dialogue = next(source for source in SOURCES if source.domain == "dialogue")
    texts = [f"User: hi {i}\nAssistant: hello" for i in range(40)]
    rendered = [as_chat(dialogue, text) for text in texts]
    changed = [new for new, old in zip(rendered, texts, strict=True) if new != old]
    assert 5 < len(changed) < 35
    assert changed[0].endswith("<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n")


def test_attributions(tmp_path):
    (tmp_path / "README.md").write_text("| file | x |\n| a | math | there | MIT | 1,000 | 2,000 |\nother\n")
    rows = read_attributions(tmp_path / "README.md")
    assert rows["a"].licence == "MIT"
    assert rows["a"].documents == "1,000"


@pytest.fixture
def shards(tmp_path):
    """Two sources whose tokens say where they come from."""
    tokenizer = train_tokenizer(iter(["aa bb cc dd"] * 5), 262)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    report = []
    for name, base in (("one", 100), ("two", 200)):
        documents = [[0], *([base + i % 50 for i in range(30)] + [0] for _ in range(20))]
        tokens = np.concatenate(documents).astype(np.uint16)
        for part in ("train", "val"):
            (tmp_path / f"{name}.{part}.u16.xz").write_bytes(lzma.compress(tokens.tobytes()))
        report.append({"name": name, "domain": name, "rate": 1.0, "train_tokens": len(tokens)})
    (tmp_path / "corpus.json").write_text(json.dumps(report))
    return tmp_path


def test_windows_stay_in_their_source(shards):
    text = data.load_training(shards, 65)
    windows = np.asarray(data.draw(text, jax.random.key(0), 64, 65))
    assert windows.shape == (64, 65)
    for row in windows:
        assert len({token // 100 for token in row if token}) == 1
    assert {row.max() // 100 for row in windows} == {1, 2}
    assert sum(row[0] in (100, 200) for row in windows) > 8  # some start where a document does


def test_validation_counts_every_byte_once(shards):
    text = data.load_validation(shards, 64)
    sizes = data.token_bytes(data.Tokenizer.from_file(str(shards / "tokenizer.json")))
    shard = data.read_shard(shards / "one.val.u16.xz")
    assert text.bytes_of_text[0] == sizes[shard].sum()
    assert text.mask[text.source == 0].sum() == (shard != 0).sum()
