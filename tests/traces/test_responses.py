"""Answers of vLLM's server become the trace that they are of, or are refused with their line."""

import base64
import io
import json

import numpy as np
import pytest

from seqmoe_jax.cli.main import main
from seqmoe_jax.errors import TraceError
from seqmoe_jax.traces.format import read_trace
from seqmoe_jax.traces.responses import read_responses

EXPERTS, LAYERS, ACTIVE = 8, 3, 2
PROMPT, ANSWER = [11, 12, 13], [21, 22, 23, 24]


def npy_base64(values, dtype="uint8"):
    file = io.BytesIO()
    np.save(file, np.array(values, dtype))
    return base64.b64encode(file.getvalue()).decode()


def routing(tokens, seed=0):
    order = np.random.default_rng(seed).random((tokens, LAYERS, EXPERTS)).argsort(-1)
    return order[..., :ACTIVE]


def write(path, *answers):
    path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    return path


def answer(**changes):
    choice = {"text": "x", "token_ids": ANSWER, "routed_experts": npy_base64(routing(6))} | changes.pop("choice", {})
    return {"object": "text_completion", "choices": [choice], "prompt_token_ids": PROMPT} | changes


def read(path):
    return read_responses(path, experts=EXPERTS, model="owner/m")


def test_routing_of_prompt_and_answer_together_in_base64(tmp_path):
    trace = read(write(tmp_path / "r.jsonl", answer(), answer(choice={"routed_experts": npy_base64(routing(7))})))
    np.testing.assert_array_equal(trace.ids[:6], routing(6))
    assert trace.tok[:6].tolist() == PROMPT + ANSWER[:3], "the last token was not processed"
    assert trace.tok[6:].tolist() == PROMPT + ANSWER
    assert (trace.lens.tolist(), trace.prefill_lens.tolist()) == ([6, 7], [3, 3])
    assert (trace.sizes, trace.model, trace.split) == ({"layers": 3, "experts": 8, "active": 2}, "owner/m", None)
    assert np.unique(trace.probs_u8).tolist() == [128]


def test_routing_of_the_prompt_apart_in_lists_and_several_choices(tmp_path):
    choices = [{"token_ids": ANSWER, "routed_experts": routing(4, seed).tolist()} for seed in (1, 2)]
    said = {
        "choices": choices,
        "prompt_token_ids": PROMPT,
        "prompt_routed_experts": routing(3).tolist(),
        "split": "test",
    }
    trace = read(write(tmp_path / "r.jsonl", said))
    np.testing.assert_array_equal(trace.ids, np.concatenate([routing(3), routing(4, 1), routing(3), routing(4, 2)]))
    assert trace.split.tolist() == ["test", "test"]
    assert trace.decoded().sum() == 8


def test_the_prompts_tokens_may_be_in_the_choice(tmp_path):
    said = answer(choice={"prompt_token_ids": PROMPT})
    del said["prompt_token_ids"]
    assert read(write(tmp_path / "r.jsonl", said)).prefill_lens.tolist() == [3]


def test_what_the_prefix_cache_had_is_left_out_and_so_are_dense_layers(tmp_path):
    ids = routing(6)
    ids[:2], ids[:, 1] = -1, 0
    ids[:2, 1] = -1
    trace = read(write(tmp_path / "r.jsonl", answer(choice={"routed_experts": ids.tolist()})))
    np.testing.assert_array_equal(trace.ids, ids[2:, [0, 2]])
    assert trace.layer_index.tolist() == [0, 2]
    assert (trace.lens.tolist(), trace.prefill_lens.tolist(), trace.tok[0]) == ([4], [1], PROMPT[2])


UNKNOWN = routing(6)
UNKNOWN[4] = -1
TWICE = routing(6)
TWICE[2, 1] = 3


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([1], "line 1: expected an answer of vLLM's server with 'choices'"),
        ({"choices": [3]}, "line 1, choice 0: expected an object, got 3"),
        (answer(prompt_token_ids=None), "expected prompt_token_ids, .* got None; ask with return_token_ids"),
        (answer(choice={"token_ids": [1, True]}), "expected token_ids"),
        (answer(choice={"routed_experts": None}), "serve with --enable-return-routed-experts"),
        (answer(choice={"routed_experts": "?"}), "lists or an npy file in base64, got neither"),
        (answer(choice={"routed_experts": [[[1, 2]], [[1]]]}), "got neither"),
        (answer(choice={"routed_experts": [[1, 2]]}), r"got int64 of shape \(1, 2\)"),
        (answer(choice={"routed_experts": npy_base64([[[0.5]]], "float32")}), "got float32"),
        (answer(choice={"routed_experts": routing(5).tolist()}), r"6 or 7 tokens \(3 of the prompt\), got that of 5"),
        (answer(choice={"routed_experts": UNKNOWN.tolist()}), "routing of a decoded token is not known"),
        (answer(choice={"token_ids": [1], "routed_experts": routing(3).tolist()}), "at least one decoded token"),
        (answer(choice={"routed_experts": TWICE.tolist()}), "an expert appears twice at step 2, layer 1"),
        (answer(choice={"routed_experts": (routing(6) + 4).tolist()}), "is out of range: expected 0 to 7"),
        (answer(choice={"routed_experts": (routing(6) + 70000).tolist()}), "expected expert ids from 0 to 7, got 7000"),
        (answer(split=3), "field 'split' must be text"),
    ],
)  # fmt: skip
def test_faults_name_the_line(tmp_path, said, words):
    with pytest.raises(TraceError, match=words):
        read(write(tmp_path / "r.jsonl", said))


def test_answers_are_of_one_model_and_all_or_none_have_a_split(tmp_path):
    with pytest.raises(TraceError, match="either every answer has a 'split' or none has"):
        read(write(tmp_path / "r.jsonl", answer(), answer(split="train")))
    with pytest.raises(TraceError, match="expected answers of one model"):
        read(write(tmp_path / "r.jsonl", answer(), answer(choice={"routed_experts": routing(6)[:, :2].tolist()})))
    (tmp_path / "r.jsonl").write_text("\n")
    with pytest.raises(TraceError, match="has no answers"):
        read(tmp_path / "r.jsonl")
    with pytest.raises(TraceError, match="no such file"):
        read(tmp_path / "none.jsonl")


def test_an_array_that_claims_more_than_it_has_is_not_believed(tmp_path):
    spoiled = base64.b64decode(npy_base64(routing(6))).replace(b"(6, 3, 2)", b"(9, 9, 9)")
    said = answer(choice={"routed_experts": base64.b64encode(spoiled).decode()})
    with pytest.raises(TraceError, match="got neither"):
        read(write(tmp_path / "r.jsonl", said))


def test_the_command(tmp_path, capsys):
    write(tmp_path / "r.jsonl", answer())
    words = [
        "import-trace",
        str(tmp_path / "r.jsonl"),
        "--experts",
        "8",
        "--model",
        "m",
        "--out",
        str(tmp_path / "T.npz"),
    ]
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["sequences"], said["prompt_steps"], said["decode_steps"], said["layers"]) == (1, 3, 3, 3)
    assert read_trace(tmp_path / "T.npz").model == "m"
    assert main(words) == 0, "the same again"
    write(tmp_path / "r.jsonl", answer(), answer())
    assert main(words) == 2
    assert "has a trace of another run" in capsys.readouterr().err
