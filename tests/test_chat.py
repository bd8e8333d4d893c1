"""Conversations become the prompts that each family was trained on, and its replies become text."""

import json
import shutil
from datetime import date, datetime
from pathlib import Path

import pytest

import seqmoe_jax
from seqmoe_jax.errors import ConfigError, PromptError
from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.text import chat_of, eos_token_ids, harmony, model_sampling
from seqmoe_jax.text.chat import check_messages, jinja_render
from seqmoe_jax.text.tiktoken import TiktokenTokenizer

DATA = Path(__file__).parent / "data"
DEMO = Path(seqmoe_jax.__file__).parent / "demo"
HELLO = [{"role": "user", "content": "Hello"}]
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
]


def render(template, messages=HELLO, special=None, **options):
    return jinja_render(template, special=special or {}, where="template")(messages, **options)


def test_the_demo_model_has_a_template():
    assert chat_of(DEMO, "qwen3_moe").prompt(HELLO) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_the_jinja_file_goes_before_the_field(tmp_path):
    shutil.copy(DEMO / "tokenizer_config.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    assert chat_of(tmp_path, "qwen3_moe").prompt(HELLO) == "Hello!"


def test_of_several_templates_the_default_one_is_taken(tmp_path):
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert chat_of(tmp_path, "qwen3_moe").prompt(HELLO) == "yes"


def test_without_a_template_there_is_no_chat_but_of_families_with_their_own(tmp_path):
    assert chat_of(tmp_path, "qwen3_moe") is None
    assert chat_of(tmp_path, "gpt_oss") is not None
    assert chat_of(tmp_path, "deepseek_v4") is not None


def test_templates_get_what_transformers_gives_them():
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    assert render("{{ bos_token }}|{{ eos_token }}", special=special) == "<s>|</s>"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"
    assert render("{{ add_generation_prompt }}{{ enable_thinking }}", enable_thinking=False) == "TrueFalse"
    assert render("{{ tools is none }}") == "True"


def test_a_template_that_refuses_says_so_in_one_line():
    with pytest.raises(PromptError, match="roles must alternate") as error:
        render("{{ raise_exception('roles must\nalternate') }}")
    assert "\n" not in str(error.value)
    with pytest.raises(PromptError, match="tool_calls"):
        render("{{ messages[0].tool_calls[0].name }}")
    with pytest.raises(ConfigError, match="Jinja"):
        render("{% for %}")


def test_templates_are_sandboxed():
    for template in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(PromptError):
            render(template + "{{ messages.__class__.__base__.__subclasses__() }}")


def test_contents_are_text_or_parts_of_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "user", "content": parts}])[0]["content"] == "ab"
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    for bad in (
        "hi",
        [],
        [3],
        [{"content": "x"}],
        [{"role": "user", "content": image}],
        [{"role": "user", "content": 3}],
    ):
        with pytest.raises(PromptError, match="message"):
            check_messages(bad)


def test_harmony_prompts_are_as_published():
    """The examples of OpenAI's description of the format."""
    assert harmony.render(TURNS, date="2025-06-28", reasoning_effort="high") == (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\nCurrent date: 2025-06-28\n\nReasoning: high\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|>"
        "<|start|>user<|message|>2 + 2?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>4<|end|>"
        "<|start|>user<|message|>And 3 + 3?<|end|>"
        "<|start|>assistant"
    )
    assert f"Current date: {date.today().isoformat()}\n\nReasoning: medium" in harmony.render(HELLO)
    with pytest.raises(PromptError, match="low, medium, high"):
        harmony.render(HELLO, reasoning_effort="most")
    with pytest.raises(PromptError, match="tools"):
        harmony.render([{"role": "tool", "content": "x"}])


@pytest.fixture(scope="module")
def o200k():
    pytest.importorskip("tiktoken")
    return TiktokenTokenizer(DATA / "o200k_base-2000.tiktoken", family="gpt_oss")


def replied(tokenizer, text, stop=()):
    reply = harmony.Reply(tokenizer=tokenizer, stop=stop)
    pieces = []
    for token in tokenizer.encode(text):
        pieces.append(reply.push(token))
        if reply.finished:
            break
    pieces.append(reply.close())
    assert "".join(pieces) == reply.text
    return reply


def test_a_harmony_reply_is_its_final_channel(o200k):
    reply = replied(
        o200k,
        '<|channel|>analysis<|message|>User asks: "2 + 2?" Simple.<|end|>'
        "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4 日本.<|return|>",
    )
    assert (reply.text, reply.reasoning) == ("2 + 2 = 4 日本.", 'User asks: "2 + 2?" Simple.')


def test_stop_strings_count_in_the_answer_alone(o200k):
    text = "<|channel|>analysis<|message|>stop? no<|end|><|start|>assistant<|channel|>final<|message|>yes stop now"
    reply = replied(o200k, text, stop=("stop",))
    assert (reply.text, reply.reasoning, reply.finished) == ("yes ", "stop? no", True)


def test_a_tool_call_and_a_reply_without_a_channel_are_not_lost(o200k):
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
    assert (replied(o200k, call).text, replied(o200k, call).reasoning) == ("", "{}")
    assert replied(o200k, "just text").text == "just text"
    assert replied(o200k, "<|message|>hi").text == "hi"


def test_deepseek_v4_prompts_are_as_published(tmp_path):
    """The ids of the first are [0, 128803, 51453, 128804, 128822] in the whole tokenizer."""
    chat = chat_of(tmp_path, "deepseek_v4")
    bos, eos = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"  # noqa: RUF001
    user, assistant = "<｜User｜>", "<｜Assistant｜>"  # noqa: RUF001
    assert chat.prompt([{"role": "user", "content": "ABCD"}]) == f"{bos}{user}ABCD{assistant}</think>"
    assert chat.prompt(TURNS, enable_thinking=True) == (
        f"{bos}Be brief.{user}2 + 2?{assistant}</think>4{eos}{user}And 3 + 3?{assistant}<think>"
    )
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert chat.prompt(twice) == f"{bos}{user}a\n\nb{assistant}</think>"
    for bad in (TURNS[:3], [{"role": "tool", "content": "x"}]):
        with pytest.raises(PromptError, match="deepseek_v4"):
            chat.prompt(bad)


def test_an_option_that_a_format_does_not_take_is_refused(tmp_path):
    with pytest.raises(PromptError, match="colour"):
        chat_of(tmp_path, "gpt_oss").prompt(HELLO, colour="red")


def test_gpt_oss_ends_where_it_returns_or_calls(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [200002, 199999]}))
    assert eos_token_ids(tmp_path, "gpt_oss") == (200002, 199999, 200012)
    assert eos_token_ids(tmp_path, "qwen3_moe") == (200002, 199999)


def test_sampling_of_the_model_is_what_its_file_says(tmp_path):
    path = tmp_path / "generation_config.json"
    assert model_sampling(tmp_path) == SamplingConfig()
    path.write_text(json.dumps({"temperature": 0.6}))
    assert model_sampling(tmp_path).greedy
    path.write_text(json.dumps({"do_sample": True}))
    assert model_sampling(tmp_path) == SamplingConfig(temperature=1.0)
    path.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}))
    assert model_sampling(tmp_path) == SamplingConfig(temperature=0.6, top_k=20, top_p=0.95)
    for bad in ({"do_sample": True, "top_p": 2}, {"do_sample": True, "temperature": "hot"}):
        path.write_text(json.dumps(bad))
        with pytest.raises(ConfigError, match=r"generation_config\.json"):
            model_sampling(tmp_path)
    assert model_sampling(DEMO) == SamplingConfig(temperature=0.7, top_k=40)


def test_the_same_prompt_as_transformers():
    """A template that uses most of what templates use, through both."""
    transformers = pytest.importorskip("transformers")
    template = (
        "{{ bos_token }}{% for message in messages %}\n"
        "    {%- if loop.index0 == 9 %}{% break %}{% endif %}\n"
        "    {% set role = message.role | upper %}\n"
        "[{{ role }}]{{ message.content | trim | tojson }}{% generation %}{{ eos_token }}{% endgeneration %}\n"
        "  {% endfor %}\n{% if add_generation_prompt %}>{% endif %}\n"
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(DEMO / "tokenizer.json"), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    expected = tokenizer.apply_chat_template(TURNS, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert render(template, TURNS, special={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}) == expected
