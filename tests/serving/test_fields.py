"""Every field that clients of OpenAI, vLLM and llama.cpp send is applied, cannot matter, or is refused by name."""

import json
import re
from pathlib import Path

import pytest
from client import COMPLETIONS, HELLO, call, post

from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.serving.fields import FIELDS, docs
from seqmoe_jax.serving.limits import CHARACTERS_PER_TOKEN, Limits
from seqmoe_jax.serving.query import parse
from seqmoe_jax.serving.table import ROWS

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
CHAT = "/v1/chat/completions"
BODIES = {CHAT: {"messages": HELLO, "max_tokens": 1}, COMPLETIONS: {"prompt": "a", "max_tokens": 1}}

# What the references name. A value that matters, for those that are refused; None: nothing that is sent can matter.
OPENAI_CHAT = dict(
    messages=HELLO, model="tiny", audio={"voice": "alloy", "format": "wav"}, frequency_penalty=0.5,
    function_call={"name": "f"}, functions=[{"name": "f"}], logit_bias={"5": -100}, logprobs=True,
    max_completion_tokens=3, max_tokens=3, metadata=None, modalities=["text", "audio"], moderation={"model": "m"}, n=2,
    parallel_tool_calls=False, prediction=None, presence_penalty=-1.5, prompt_cache_key=None, prompt_cache_options=None,
    prompt_cache_retention=None, reasoning_effort="low", response_format={"type": "json_object"},
    safety_identifier=None, seed=3, service_tier=None, stop="x", store=None, stream=False,
    stream_options={"include_usage": True}, temperature=0.5, tool_choice="auto", tools=[],
    top_logprobs=3, top_p=0.5, user=None, verbosity="low", web_search_options={},
)  # fmt: skip
OPENAI_COMPLETIONS = dict(
    model="tiny", prompt="a", best_of=3, echo=True, frequency_penalty=0.5, logit_bias={"5": -100}, logprobs=0,
    max_tokens=3, n=2, presence_penalty=0.1, seed=3, stop=["x"], stream=False, stream_options={"include_usage": True},
    suffix="end", temperature=0, top_p=0.9, user=None,
)  # fmt: skip
VLLM = dict(
    use_beam_search=True, top_k=5, min_p=0.1, repetition_penalty=1.5, watermarking=True, length_penalty=0.5,
    stop_token_ids=[75], include_stop_str_in_output=True, ignore_eos=True, min_tokens=5, skip_special_tokens=False,
    spaces_between_special_tokens=False, truncate_prompt_tokens=5, truncation_side=None, prompt_logprobs=1,
    logprob_token_ids=[1], allowed_token_ids=[1], bad_words=["x"], guided_json={}, guided_regex="[0-9]+",
    guided_choice=["a"], guided_grammar="root", guided_decoding_backend=None, guided_whitespace_pattern=None,
    structural_tag="x", structured_outputs={"regex": "a"}, logits_processors=["x"], mm_processor_kwargs={"a": 1},
    media_io_kwargs={"image": {}}, priority=1, request_id="x", session_id=None, return_tokens_as_token_ids=True,
    return_token_ids=True, routed_experts_prompt_start=None, return_token_offsets=True, return_prompt_text=True,
    return_mm_kwargs=None, cache_salt=None, kv_transfer_params={"a": 1}, ec_transfer_params={"a": 1},
    vllm_xargs={"a": 1}, repetition_detection={"a": 1}, stream_interval=None, thinking_token_budget=5,
    include_reasoning=False, response_format={"type": "json_schema"}, prompt_embeds="x",
)  # fmt: skip
VLLM_CHAT = dict(
    echo=True, add_generation_prompt=False, continue_final_message=True, add_special_tokens=True,
    documents=[{"text": "a"}], chat_template="{{ 1 }}", chat_template_kwargs={},
)  # fmt: skip
LLAMA = dict(
    verbose=True, timings_per_token=True, cache_prompt=None, return_tokens=True, return_progress=True,
    sse_ping_interval=None, n_predict=5, n_indent=2, n_keep=None, n_discard=None, n_cmpl=2, n_cache_reuse=None,
    t_max_predict_ms=100, t_max_prompt_ms=100, response_fields=["content"], top_n_sigma=1.0, xtc_probability=0.5,
    xtc_threshold=None, typical_p=0.5, dynatemp_range=0.5, dynatemp_exponent=None, repeat_last_n=None,
    repeat_penalty=1.1, dry_multiplier=0.8, dry_base=None, dry_allowed_length=None, dry_penalty_last_n=None,
    dry_sequence_breakers=None, mirostat=2, mirostat_tau=None, mirostat_eta=None, adaptive_target=0.5,
    adaptive_decay=None, n_probs=3, min_keep=5, backend_sampling=None, post_sampling_probs=True,
    lora=[{"id": 0, "scale": 1}], json_schema={}, grammar="root ::= a", grammar_lazy=None, grammar_type=None,
    grammar_triggers=None, preserved_tokens=None, chat_format=1, chat_parser="x", parse_tool_calls=True,
    reasoning_format="deepseek", reasoning_in_content=True, reasoning_control=True, reasoning_budget_tokens=5,
    reasoning_budget_start_tag=None, reasoning_budget_end_tag=None, reasoning_budget_end_tags=None,
    reasoning_budget_message=None, generation_prompt="x", thinking_forced_open=True, samplers=["top_k"], id_slot=None,
    slot_id=None, penalize_nl=None, penalty_prompt="x", tfs_z=0.5, image_data=[{"id": 1}], system_prompt="x",
    input_prefix="x", input_suffix="x", input_extra=[{"text": "x"}],
)  # fmt: skip
APPLIED_IN_CHAT_OPTIONS = "reasoning_effort"  # this model's format has none


def fields_of(path):
    """(field, a value that matters) of each name that may come to this endpoint."""
    names = {**VLLM, **LLAMA, **({**VLLM_CHAT, **OPENAI_CHAT} if path == CHAT else OPENAI_COMPLETIONS)}
    for name, matters in names.items():
        yield FIELDS.get((name, "both")) or FIELDS[name, path.split("/")[2]], matters


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_name_that_matters_and_is_not_applied_is_named(port, path):
    for field, matters in fields_of(path):
        if field.does == "refused":
            status, answer = post(port, path, **BODIES[path], **{field.name: matters})
            assert status == 400, field.name
            assert answer["error"]["param"] == field.name
            assert answer["error"]["message"].startswith(f"{field.name} is not supported, got ")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_name_is_accepted_where_it_asks_for_nothing(port, path):
    plain = post(port, path, **BODIES[path])[1]["choices"]
    fields = [field for field, _ in fields_of(path) if field.name not in ("messages", "prompt", "max_tokens")]
    for turn in range(3):
        body = dict.fromkeys((field.name for field in fields), None)
        for field in fields:
            values = field.neutral if field.does == "refused" else () if field.does == "applied" else (5, "x", {"a": 1})
            if values:
                body[field.name] = values[turn % len(values)]
        status, answer = post(port, path, **BODIES[path], **body)
        assert status == 200, answer
        assert answer["choices"] == plain


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_name_that_is_applied_is_taken(port, path):
    for field, matters in fields_of(path):
        if field.does == "applied" and field.name != APPLIED_IN_CHAT_OPTIONS:
            body = BODIES[path] | {field.name: matters}
            if field.name == "max_completion_tokens":
                del body["max_tokens"]
            status, answer = post(port, path, **body)
            assert status == 200, (field.name, answer)


def test_a_name_is_in_the_table_once():
    assert len(FIELDS) == len(ROWS)
    both = [field.name for field in ROWS if field.endpoint == "both"]
    assert not {field.name for field in ROWS if field.endpoint != "both"} & set(both)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"temprature": 0.5}, "temprature", "did you mean temperature?"),
        ({"whatever": 1}, "whatever", "unknown field whatever"),
        ({"x" * 300: 1}, None, "unknown field 'xxx"),
        ({"a\u2028b\x1b[2J": 1}, None, "unknown field"),
        ({"messages": HELLO}, "messages", "messages is a field of /v1/chat/completions"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs", "/v1/chat/completions"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "not padded"),
        ({"stream_options": {"usage": True}}, "stream_options.usage", "unknown field"),
        ({"stream_options": []}, "stream_options", "must be an object"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "two names of one number"),
        ({"max_tokens": 10**400}, "max_tokens", "must be an integer from 1 to"),
        ({"max_tokens": 3.5}, "max_tokens", "must be an integer"),
        ({"max_tokens": True}, "max_tokens", "must be an integer"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "must be an integer from 1"),
        ({"max_completion_tokens": 600}, "max_completion_tokens", "max_completion_tokens is 600, but the context is"),
        ({"temperature": 10**400}, "temperature", "must be a number from 0 to 100"),
        ({"temperature": [1]}, "temperature", "must be a number"),
        ({"temperature": "a" * 10**5}, "temperature", "got 'aaa"),
        ({"top_p": 0}, "top_p", "must be a number above 0"),
        ({"top_p": -1e-9}, "top_p", "must be a number above 0"),
        ({"min_p": 1}, "min_p", "below 1"),
        ({"top_k": -2}, "top_k", "must be an integer from -1"),
        ({"seed": 1.5}, "seed", "must be an integer"),
        ({"seed": 2**63}, "seed", "must be an integer"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": "a" * 257}, "stop", "1 to 256 characters"),
        ({"stop": [["a"]]}, "stop", "must be a string or a list"),
        ({"n": 1.5}, "n", "leave it out or send 1"),
        ({"n": True}, "n", "n is not supported, got True"),
        ({"model": ["tiny"]}, "model", "must be text"),
    ],
)
def test_a_fault_names_the_field_and_says_what_to_do(port, body, param, words):
    status, answer = post(port, COMPLETIONS, **{"prompt": "a", **body})
    assert status == 400
    assert words in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 1100
    assert answer["error"]["message"].isprintable()
    if param is not None:
        assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    ("prompt", "param", "words"),
    [
        (None, "prompt", "prompt is missing"),
        ([], "prompt", "must be text, a list of token ids"),
        ("", "prompt", "prompt is empty"),
        (["a", ""], "prompt[1]", "prompt[1] is empty"),
        ([[1], []], "prompt[1]", "prompt[1] is empty"),
        (["a", 1], "prompt", "must be text"),
        ([[1], ["a"]], "prompt", "must be text"),
        ([True, 1], "prompt", "must be text"),
        ([1.0], "prompt", "must be text"),
        ({"text": "a"}, "prompt", "must be text"),
        ([[1], [-1]], "prompt[1]", "vocabulary of 256"),
        ([2**70], "prompt", "vocabulary of 256"),
        (["a"] * 1025, "prompt", "at most 1024"),
        (["a", "b" * 512], "prompt[1]", "prompt[1] has 512 tokens, but the context is 512"),
    ],
)
def test_prompts_are_checked_one_by_one(port, prompt, param, words):
    status, answer = post(port, COMPLETIONS, prompt=prompt)
    assert status == 400
    assert words in answer["error"]["message"]
    assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "messages", "messages must be a list"),
        ({"messages": "Hello"}, "messages", "messages must be a list"),
        ({"messages": [*HELLO, {"role": "banana", "content": ""}]}, "messages[1]", "messages[1] has the role"),
        ({"messages": [*HELLO, 3]}, "messages[1]", "messages[1] must be an object"),
        ({"messages": HELLO, "prompt": "a"}, "prompt", "prompt is a field of /v1/completions"),
        ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "but not"),
        ({"messages": HELLO, "chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs", "not"),
        ({"messages": HELLO, "chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs", "names"),
        ({"messages": HELLO, "chat_template_kwargs": [1]}, "chat_template_kwargs", "an object"),
        ({"messages": HELLO, "reasoning_effort": "low"}, "reasoning_effort", "reasoning_effort is no option of this"),
        (
            {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs.enable_thinking",
            "it reads none",
        ),
        ({"messages": HELLO, "max_tokens": 511}, "max_tokens", "lower max_tokens to 506"),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages", "601 tokens"),
        (
            {"messages": HELLO, "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "chat_template_kwargs",
            "give it once",
        ),
    ],
)
def test_conversations_are_checked(port, body, param, words):
    status, answer = post(port, CHAT, **body)
    assert status == 400
    assert words in answer["error"]["message"]
    assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    "body",
    [b"[" * 200_000, b'{"n": NaN}', b'{"n": 1' + b"0" * 5000 + b"}", b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}',
     b"", b'{"prompt": "a"', b"null", b"[1]", b'"a"'],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_one_line(port, body):
    status, answer = call(port, "POST", COMPLETIONS, body)
    assert status == 400
    assert "the body" in json.loads(answer)["error"]["message"]


def test_both_endpoints_take_both_names_of_the_most_new_tokens(port):
    for name in ("max_tokens", "max_completion_tokens"):
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO})):
            assert post(port, path, **body, **{name: 3})[1]["usage"]["completion_tokens"] == 3


def test_the_usual_number_of_new_tokens_gives_way_to_the_context(engine):
    query = parse({"prompt": "a" * 505}, engine, SamplingConfig(), model="tiny", chat=False)
    assert query.requests[0].max_new_tokens == 7


def test_a_given_seed_holds_for_every_prompt_and_without_one_each_draws_its_own(port):
    body = dict(prompt=["Once", "Once"], max_tokens=8, temperature=5)
    first, second = (choice["text"] for choice in post(port, COMPLETIONS, **body, seed=3)[1]["choices"])
    assert first == second == post(port, COMPLETIONS, **{**body, "prompt": "Once"}, seed=3)[1]["choices"][0]["text"]
    for seed in ({}, {"seed": -1}):
        first, second = (choice["text"] for choice in post(port, COMPLETIONS, **body, **seed)[1]["choices"])
        assert first != second


def test_the_docs_have_the_limits():
    limits, text = Limits(), DOCS.read_text()
    assert (limits.body, CHARACTERS_PER_TOKEN * 4) == (16 << 20, 512)
    for said in (f"| {limits.values:,} |", f"| {limits.prompts:,} |", f"| {limits.stops}, of {limits.stop_length} char",
                 f"| {limits.waiting} |", f"{limits.pause:g} seconds without a byte, {limits.body_time:g} seconds in",
                 f"{CHARACTERS_PER_TOKEN} characters for each token"):  # fmt: skip
        assert said in text, said


def test_the_docs_print_the_table():
    assert docs() in DOCS.read_text()
    named = set(re.findall(r"^\| `([\w.]+)`", DOCS.read_text(), re.MULTILINE))
    assert {field.name for field in ROWS} <= named
