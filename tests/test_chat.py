"""Conversations become the prompts that each family was trained on, and its replies become text."""

import json
import shutil
from datetime import date, datetime
from pathlib import Path

import pytest

import seqmoe_jax
from seqmoe_jax.errors import ConfigError, PromptError
from seqmoe_jax.text import chat_of, harmony
from seqmoe_jax.text.chat import Chat
from seqmoe_jax.text.messages import check_messages
from seqmoe_jax.text.template import Template, open_template
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
    return Template({"default": template}, special=special or {}, where="template")(messages, **options)


def prompt(template, messages, **options):
    return Chat(render=Template({"default": template}, special={}, where="template")).prompt(messages, **options)


def test_the_demo_model_has_a_template():
    assert chat_of(DEMO, "qwen3_moe").prompt(HELLO) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_the_jinja_file_goes_before_the_field(tmp_path):
    shutil.copy(DEMO / "tokenizer_config.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    assert chat_of(tmp_path, "qwen3_moe").prompt(HELLO) == "Hello!"


def test_of_several_templates_the_default_one_is_taken(tmp_path):
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert open_template(tmp_path)(HELLO) == "yes"
    assert open_template(tmp_path)(HELLO, tools=[]) == "no"


def test_without_a_template_there_is_no_chat_but_of_families_with_their_own(tmp_path):
    assert chat_of(tmp_path, "qwen3_moe") is None
    assert chat_of(tmp_path, "gpt_oss") is not None
    assert chat_of(tmp_path, "deepseek_v4") is not None


def test_templates_get_what_transformers_gives_them():
    special = {"bos_token": "<s>", "eos_token": "</s>"}
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


THREE_ROLES = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<{{ m.role }}>{{ m.content | trim }}"
    "{% endif %}{% endfor %}<assistant>"
)


def test_a_developer_is_the_system_where_the_template_does_not_know_one():
    messages = [{"role": "developer", "content": "Be brief."}, *HELLO]
    assert prompt(THREE_ROLES, messages) == "<system>Be brief.<user>Hello<assistant>"
    knowing = THREE_ROLES.replace("'system'", "'system', 'developer'")
    assert prompt(knowing, messages) == "<developer>Be brief.<user>Hello<assistant>"


@pytest.mark.parametrize("role", ["function", "banana", "System", ""])
def test_a_role_that_nobody_knows_is_refused(role):
    with pytest.raises(PromptError, match=rf"messages\[1\] has the role '{role}'; expected one of system, dev"):
        check_messages([*HELLO, {"role": role, "content": "x"}])


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "tool", "content": "21 degrees"}, r"messages\[1\] \(role tool\)"),
        ({"role": "tool", "content": "e"}, r"messages\[1\] \(role tool\)"),  # stands elsewhere in the prompt
        ({"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather"}}]},
         r"messages\[1\].tool_calls \(role assistant\)"),
    ],
)  # fmt: skip
def test_a_message_that_the_template_leaves_out_is_a_fault(message, named):
    with pytest.raises(PromptError, match=named):
        prompt(THREE_ROLES, [*HELLO, message])
    with pytest.raises(PromptError, match=r"messages\[2\] \(role system\)"):
        prompt("{{ messages[0].content }}{{ messages[1].content }}", [*HELLO, *HELLO, TURNS[0]])


def test_what_templates_do_to_texts_is_no_fault():
    for template in (
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content | tojson(ensure_ascii=true) }}{% endfor %}",
        "{% for m in messages %}{{ m.content.split('</think>')[-1] | trim }}{% endfor %}",
        "{% for m in messages %}{{ m.content[:3] }}{% endfor %}",
        "{% for m in messages %}{% if (m.content | trim)[0] not in '12347' %}{{ raise_exception('no number') }}"
        "{% endif %}{{ m.content }}{% endfor %}",
    ):
        texts = ["7", "  1 'é'\n", "<think>2</think>3" if "think" in template else "3", "4"]
        messages = [
            {"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, texts, strict=True)
        ]
        assert prompt(template, messages)
    thoughts = [*HELLO, {"role": "assistant", "content": "<think>only this</think>"}, *HELLO]
    assert prompt("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}", thoughts) == "HelloHello"


CALLS = "{% for m in messages %}{{ m.content or '' }}{% for call in m.tool_calls or [] %}{{ call.function.name }}"
ITEMS = CALLS + "{% for k, v in call.function.arguments | items %} {{ k }}={{ v }}{% endfor %}{% endfor %}{% endfor %}"


def calling(arguments):
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]


def test_arguments_of_tool_calls_may_be_json_in_a_string():
    for arguments in ('{"city": "Bern", "days": 2}', {"city": "Bern", "days": 2}):
        assert prompt(ITEMS, calling(arguments)) == "Helloweather city=Bern days=2"
    assert prompt(ITEMS, calling("")) == "Helloweather"
    text = "{{ messages[1].tool_calls[0].function.name + messages[1].tool_calls[0].function.arguments }}"
    with pytest.raises(PromptError, match=r"messages\[0\] \(role user\)"):
        prompt(text, calling('{"a":1}'))
    assert prompt("{{ messages[0].content }} " + text, calling('{"a":1}')) == 'Hello weather{"a":1}'
    for bad in ("{", "3", "[]", [1], 3):
        with pytest.raises(
            PromptError, match=r"messages\[1\].tool_calls\[0\].function.arguments .* must be a JSON obj"
        ):
            prompt(ITEMS, calling(bad))


def test_an_assistant_that_calls_tools_may_say_nothing_and_nulls_are_left_out():
    call = {"function": {"name": "f", "arguments": {}}}
    given = {"role": "assistant", "content": None, "tool_calls": [call], "name": None}
    assert check_messages([given]) == [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert check_messages([{"role": "assistant", "content": None, "tool_calls": None}])[0] == {
        "role": "assistant", "content": ""
    }  # fmt: skip
    for bad in (
        {"role": "user", "content": None},
        {"role": "user"},
        {"role": "user", "content": "x", "tool_calls": [call]},
        {"role": "assistant", "content": "", "tool_calls": [{}]},
        {"role": "assistant", "function_call": {"name": "f"}},
    ):
        with pytest.raises(PromptError, match=r"messages\[0\]"):
            check_messages([bad])


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


def replied(tokenizer, text, stop=(), prompt=""):
    reply = harmony.Reply(tokenizer=tokenizer, stop=stop, context=tokenizer.encode(prompt))
    pieces = []
    for token in tokenizer.encode(text):
        pieces.append(reply.push(token))
        if reply.finished:
            break
    pieces.append(reply.close())
    assert "".join(pieces) == reply.text
    reply.pieces = pieces
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


OPENED = "<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>{}<|message|>"


def test_a_channel_that_the_template_opened_is_where_the_reply_begins(o200k):
    reply = replied(o200k, "Hello there.", prompt=OPENED.format("final"))
    assert "".join(reply.pieces[:-1]) == reply.text == "Hello there."  # streamed, not held back
    more = "one<|end|><|start|>assistant<|channel|>final<|message|>two<|return|>"
    assert replied(o200k, more, prompt=OPENED.format("final")).text == "onetwo"
    stopped = replied(o200k, "Hello stop there", stop=("stop",), prompt=OPENED.format("final"))
    assert (stopped.text, stopped.finished) == ("Hello ", True)
    assert len(stopped.pieces) < len(o200k.encode("Hello stop there")) + 1

    thought = "hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>"
    reply = replied(o200k, thought, prompt=OPENED.format("analysis"))
    assert (reply.text, reply.reasoning) == ("yes", "hm")
    begun = replied(o200k, "ysis<|message|>hm<|end|>", prompt="<|start|>assistant<|channel|>anal")
    assert (begun.text, begun.reasoning) == ("", "hm")
    assert replied(o200k, " I think", prompt=OPENED.format("final") + "Well,").text == " I think"


def test_text_without_a_header_is_not_held_back(o200k):
    for before in ("", "<|start|>assistant", OPENED.format("final") + "x<|end|>"):
        reply = replied(o200k, "Hello there. Stop here.", stop=("Stop",), prompt=before)
        assert (reply.text, reply.finished) == ("Hello there. ", True), before
    cut = replied(o200k, "yes<|end|><|start|>assistant<|channel|>comm", prompt=OPENED.format("final"))
    assert cut.text == "yes"


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
