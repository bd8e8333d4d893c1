"""Recorded routing is that of decoding; a killed recording goes on; faults of a file of prompts name the line."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from seqmoe_jax.cli.main import main
from seqmoe_jax.cli.trace import encode
from seqmoe_jax.decode import layer
from seqmoe_jax.errors import OutputError, PromptError
from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.testing import tiny_engine
from seqmoe_jax.traces import record as recording
from seqmoe_jax.traces.format import read_trace
from seqmoe_jax.traces.prompts import Prompt, read_prompts
from seqmoe_jax.traces.record import Recording, stored_routing

NEW = 5
CONFIG = Recording(max_new_tokens=NEW)
PROMPTS = [Prompt(text="once upon", split="train"), Prompt(text="x", split="test"), Prompt(text="so", split="train")]


def record(engine, prompts, config, out, **options):
    return recording.record(engine.token_engine, prompts, encode(engine, prompts, chat=False), config, out, **options)


@pytest.fixture(scope="module")
def engine():
    return tiny_engine(residency=0.5, policy="lru")


@pytest.fixture(scope="module")
def trace(engine, tmp_path_factory):
    out = tmp_path_factory.mktemp("traces") / "T.npz"
    return record(engine, PROMPTS, CONFIG, out, model="tiny")


def test_the_replay_routes_as_decoding_did(monkeypatch):
    """Against a recording made inside the decode step itself."""
    decoded: dict[int, np.ndarray] = {}
    moe_decode = layer.moe_decode

    def listening(x, ids, weights, slots, pool, index, *rest):
        jax.debug.callback(lambda clock, now: decoded.update({int(clock): np.array(now)}), slots.clock + index, ids)
        return moe_decode(x, ids, weights, slots, pool, index, *rest)

    monkeypatch.setattr(layer, "moe_decode", listening)
    monkeypatch.setattr("seqmoe_jax.prefill.lengths.CHUNK", 32)  # several chunks of prefill
    # Of a shape that no other test has: a step compiled before does not listen.
    engine = tiny_engine(seed=3, residency=0.7, policy="lru", max_batch=2)
    prompts = [[5, 6, 7, 8, 9], list(range(40, 60))]
    new: list[list[int]] = [[], []]
    for event in engine.token_engine.run(prompts, max_new_tokens=9):
        new[event.sequence].append(event.token)
    jax.effects_barrier()
    layers, active = 2, 2
    steps = np.array([decoded[clock] for clock in sorted(decoded)][: 8 * layers]).reshape(8, layers, 2, active)
    replayed = engine.token_engine.routing([prompt + tokens[:-1] for prompt, tokens in zip(prompts, new, strict=True)])
    for row, (ids, weights) in enumerate(replayed):
        assert np.array_equal(ids[len(prompts[row]) :], steps[:, :, row])
        assert np.all(weights[..., 0] >= weights[..., 1])
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)


def test_a_trace_holds_prompts_and_what_followed_in_order(engine, trace):
    texts = [prompt.text for prompt in PROMPTS]
    assert trace.sequences == 3
    assert trace.prefill_lens.tolist() == [len(text) for text in texts]
    assert trace.lens.tolist() == [len(text) + NEW - 1 for text in texts]
    assert trace.split.tolist() == ["train", "test", "train"]
    assert trace.metadata["prompt_index"].tolist() == [0, 1, 2]
    assert (trace.model, trace.sizes) == ("tiny", {"layers": 2, "experts": 8, "active": 2})
    assert trace.layer_index.tolist() == [0, 2]
    for (start, _), text in zip(trace.spans(), texts, strict=True):
        assert bytes(trace.tok[start : start + len(text)].tolist()).decode() == text
    start, stop = trace.spans()[1]
    greedy = engine.generate(texts[1], max_new_tokens=NEW)
    assert trace.tok[start + len(texts[1]) : stop].tolist() == greedy.tokens[:-1]
    ids, weights = engine.token_engine.routing([trace.tok[start:stop].tolist()])[0]
    assert np.array_equal(trace.ids[start:stop], ids)
    assert np.abs(trace.probs_u8[start:stop] / 255 - weights).max() <= 0.5 / 255 + 1e-6


def test_what_decoding_did_can_be_told_from_the_prompts(trace):
    assert trace.decoded().sum() == 3 * (NEW - 1)
    alone = trace.without_prompts()
    assert alone.lens.tolist() == [NEW - 1] * 3
    assert np.array_equal(alone.ids, trace.ids[trace.decoded()])
    popularity = trace.popularity()
    np.testing.assert_allclose(popularity.sum(-1), 2, atol=1e-5)
    used = trace.activations()[~trace.decoded()].mean(0)
    np.testing.assert_allclose(popularity, used, atol=1e-6)


def test_a_killed_recording_goes_on_with_the_next_group(engine, trace, tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "GROUP", 1)
    whole = record(engine, PROMPTS, CONFIG, tmp_path / "whole.npz", model="tiny")
    assert np.array_equal(whole.ids, trace.ids), "a sequence does not depend on its group"

    def killed(done, steps):
        if done == 2:
            raise KeyboardInterrupt

    out = tmp_path / "T.npz"
    with pytest.raises(KeyboardInterrupt):
        record(engine, PROMPTS, CONFIG, out, model="tiny", progress=killed)
    assert not out.exists()
    generated = []
    monkeypatch.setattr(recording, "_group", lambda *args, group=recording._group: generated.append(1) or group(*args))
    said = []
    resumed = record(engine, PROMPTS, CONFIG, out, model="tiny", progress=lambda *now: said.append(now))
    assert len(generated) == 1
    assert said == [(1, NEW - 1), (2, 2 * (NEW - 1)), (3, 3 * (NEW - 1))]
    assert np.array_equal(resumed.ids, whole.ids)
    assert np.array_equal(resumed.tok, whole.tok)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["T.npz", "whole.npz"], "nothing is left beside"


def test_what_is_left_of_another_recording_is_not_taken(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "GROUP", 1)
    out = tmp_path / "T.npz"

    def killed(done, steps):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(engine, PROMPTS, CONFIG, out, model="tiny", progress=killed)
    other = Recording(max_new_tokens=NEW, sampling=SamplingConfig(seed=7))
    generated = []
    monkeypatch.setattr(recording, "_group", lambda *args, group=recording._group: generated.append(1) or group(*args))
    with pytest.raises(OutputError, match=r"parts has parts of another run \(seed 0 there, 7 here\): --force begins"):
        record(engine, PROMPTS, other, out, model="tiny")
    assert not generated
    record(engine, PROMPTS, other, out, model="tiny", force=True)
    assert len(generated) == 3


def test_a_trace_that_is_there_is_not_recorded_again_and_one_of_another_run_stays(engine, trace, tmp_path, monkeypatch):
    out = tmp_path / "T.npz"
    record(engine, PROMPTS, CONFIG, out, model="tiny")
    first = out.read_bytes()
    monkeypatch.setattr(recording, "_group", None)
    assert np.array_equal(record(engine, PROMPTS, CONFIG, out, model="tiny").ids, trace.ids)
    other = Recording(max_new_tokens=NEW, sampling=SamplingConfig(temperature=0.5))
    with pytest.raises(OutputError, match=r"a trace of another run \(temperature 0.0 there, 0.5 here\): --force repl"):
        record(engine, PROMPTS, other, out, model="tiny")
    with pytest.raises(OutputError, match="different prompts"):
        record(engine, PROMPTS[:1], CONFIG, out, model="tiny")
    assert out.read_bytes() == first
    monkeypatch.undo()
    assert record(engine, PROMPTS[:1], CONFIG, out, model="tiny", force=True).sequences == 1
    assert [path.name for path in tmp_path.iterdir()] == ["T.npz"]


def test_a_continuation_without_a_decode_step_is_left_out(engine, tmp_path):
    first = engine.generate(PROMPTS[0].text, max_new_tokens=2).tokens[0]
    ends = Recording(max_new_tokens=NEW, eos_token_ids=(first,))
    with pytest.raises(PromptError, match="ended at its first token"):
        record(engine, PROMPTS[:1], ends, tmp_path / "T.npz", model="tiny")


def test_sequences_that_are_decoded_together_share_a_temperature_and_no_two_share_a_seed():
    prompts = [Prompt(text="a", temperature=heat) for heat in (1.0, None, 1.0, 0.0, None)]
    config = Recording(sampling=SamplingConfig(temperature=0.5, top_k=3, seed=10))
    batches = list(recording._batches(2, prompts, [[0]] * 5, 100, config))
    assert [(rows, sampling.temperature) for rows, sampling in batches] == [([3], 0), ([1, 4], 0.5), ([0, 2], 1)]
    assert [sampling.seed for _, sampling in batches] == [110, 111, 113]
    assert {sampling.top_k for _, sampling in batches} == {3}


def test_routing_is_stored_heaviest_first_as_shares():
    ids = np.array([[[4, 300, 2]]], np.int32)
    ids, probs = stored_routing(ids, np.array([[[1.0, 2.0, 1.0]]], np.float32), 512)
    assert ids.tolist() == [[[300, 4, 2]]]
    assert ids.dtype == np.uint16
    assert probs.tolist() == [[[128, 64, 64]]]


def test_prompts_are_lines_or_json_objects(tmp_path):
    (tmp_path / "p.txt").write_text('one\n\n{"two"}\n')
    assert [prompt.text for prompt in read_prompts(tmp_path / "p.txt")] == ["one", '{"two"}']
    (tmp_path / "p.jsonl").write_text('{"prompt": "a\\nb", "split": "test", "temperature": 0.5}\n')
    assert read_prompts(tmp_path / "p.jsonl") == [Prompt(text="a\nb", split="test", temperature=0.5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ('{"prompt": "a"}\nhello', "line 2: expected UTF-8 JSON"),
        ("[1]", "line 1: expected a JSON object with 'prompt'"),
        ('{"prompt": ""}', "field 'prompt' must be text of 1"),
        ('{"prompt": "a", "temprature": 1}', "unknown field 'temprature'"),
        ('{"prompt": "a", "split": 3}', "field 'split' must be text, got 3"),
        ('{"prompt": "a", "temperature": -1}', "field 'temperature' must be a number from 0"),
        ('{"prompt": "a", "split": "x"}\n{"prompt": "a"}', "either every prompt has a 'split' or none has"),
    ],
)
def test_faults_of_a_file_of_prompts(tmp_path, text, message):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(PromptError, match=message):
        read_prompts(tmp_path / "p.jsonl")


def test_faults_that_are_said_before_anything_is_generated(engine, tmp_path):
    with pytest.raises(PromptError, match="expected a file of prompts, got no such file"):
        read_prompts(tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(PromptError, match="UTF-8"):
        read_prompts(tmp_path / "latin.txt")
    with pytest.raises(OutputError, match="no directory"):
        record(engine, PROMPTS, CONFIG, tmp_path / "no" / "T.npz", model="tiny")
    with pytest.raises(PromptError, match="prompt 0 has 508 tokens and 5 new ones"):
        record(engine, [Prompt(text="x" * 508)], CONFIG, tmp_path / "T.npz", model="tiny")
    with pytest.raises(PromptError, match="has no chat template"):
        encode(engine, PROMPTS, chat=True)
    with pytest.raises(PromptError, match="at least 2, got 1"):
        Recording(max_new_tokens=1)


def test_the_command(engine, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("seqmoe_jax.cli.trace.load_engine", lambda args, **options: engine)
    (tmp_path / "p.txt").write_text("ab\ncd\n")
    words = ["trace", "/some/where/tiny", "--prompts", str(tmp_path / "p.txt"), "--out", str(tmp_path / "T.npz")]
    more = ["--max-new-tokens", str(NEW), "--name", "owner/tiny"]
    assert main([*words, *more, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["sequences"], said["left_out"], said["prompt_steps"], said["decode_steps"]) == (2, 0, 4, 8)
    assert read_trace(tmp_path / "T.npz").model == "owner/tiny"
    assert main([*words, *more]) == 0
    assert "2 sequences of owner/tiny, 8 decode steps after 4 of prompts" in capsys.readouterr().out
    assert main([*words, *more, "--seed", "3"]) == 2
    assert "T.npz has a trace of another run (seed 0 there, 3 here): --force replaces it" in capsys.readouterr().err
    assert main([*words, *more, "--seed", "3", "--force"]) == 0
    (tmp_path / "p.txt").write_text("\n")
    assert main([*words, *more]) == 2
    assert "has no prompts" in capsys.readouterr().err
