"""Calls of tools in the text of a reply are found in every form, however the text comes; what is no call stays text."""

import json

import pytest

from seqmoe_jax.errors import PromptError
from seqmoe_jax.text import harmony
from seqmoe_jax.text.chat import Chat
from seqmoe_jax.text.template import Template
from seqmoe_jax.text.tools import Arguments, Begin, Broken, CallReader, End, Text, check_tools, form_of

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "places": {"type": "array"},
    },
}
TOOLS = {"weather": SCHEMA, "get_time": {}}
BAR, BLOCK = "\uff5c", "\u2581"


def mark(name):
    return f"<{BAR}{name.replace(' ', BLOCK)}{BAR}>"


# Templates that show their form as the published ones do.
HERMES = "<tool_call>\n{{ m | tojson }}\n</tool_call>"
XML = "<tool_call>\n<function={{ f.name }}>\n<parameter={{ k }}>\n{{ v }}\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>{{ f.name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n</tool_call>"
V31 = mark("tool calls begin") + mark("tool call begin") + "{{ f.name }}" + mark("tool sep") + "{{ f.arguments }}"
HARMONY = "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"


def deepseek(*calls, fenced=False):
    each = [
        f"function{mark('tool sep')}{name}\n```json\n{text}\n```" if fenced else f"{name}{mark('tool sep')}{text}"
        for name, text in calls
    ]
    inside = "".join(mark("tool call begin") + one + mark("tool call end") for one in each)
    return mark("tool calls begin") + inside + mark("tool calls end")


ARGUMENTS = '{"city": "S\u00e3o {Paulo}\\\\\\"", "places": [{"a": "]"}]}'
OBJECT = json.loads(ARGUMENTS)
WEATHER = ("weather", OBJECT)

CASES = {
    "hermes": (HERMES, f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>', [WEATHER]),
    "hermes, two": (
        HERMES,
        f'<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}}}</tool_call>\n'
        '<tool_call>\n{"name":"get_time","arguments":{}}\n</tool_call>\n',
        [WEATHER, ("get_time", {})],
    ),
    "hermes, arguments first": (
        HERMES,
        f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "weather"}}</tool_call>',
        [WEATHER],
    ),
    "hermes, without its end": (HERMES, '<tool_call>{"name": "get_time", "arguments": {}}', [("get_time", {})]),
    "hermes, its end in a text": (
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>"}}</tool_call>',
        [("weather", {"city": "</tool_call>"})],
    ),
    "xml": (
        XML,
        "<tool_call>\n<function=weather>\n<parameter=city>\nS\u00e3o\n\"Paulo\"\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=unit>\nnull\n</parameter>\n"
        "<parameter=places>\n[1, 2]\n</parameter>\n<parameter=other>\n7\n</parameter>\n</function>\n</tool_call>",
        [("weather", {"city": 'S\u00e3o\n"Paulo"', "days": 3, "exact": True, "unit": None, "places": [1, 2],
                      "other": "7"})],
    ),
    "xml, without the outermost": (XML, "<function=get_time>\n</function>", [("get_time", {})]),
    "glm": (
        GLM,
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>get_time\n</tool_call>",
        [("weather", {"city": "Rome", "days": 2}), ("get_time", {})],
    ),
    "deepseek v3.1": (V31, deepseek(("weather", ARGUMENTS), ("get_time", "{}")), [WEATHER, ("get_time", {})]),
    "deepseek v3": (
        V31, deepseek(("weather", ARGUMENTS), ("get_time", "{}"), fenced=True), [WEATHER, ("get_time", {})],
    ),
    "harmony": (
        HARMONY,
        f"<|start|>assistant to=functions.weather<|channel|>commentary<|message|>{ARGUMENTS}<|call|>",
        [WEATHER],
    ),
}  # fmt: skip


def read(template, text, size, **options):
    reader = CallReader(form_of(template), TOOLS, **options)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return [event for piece in pieces for event in reader.push(piece)] + reader.close()


def calls_of(events):
    """(name, arguments) of the complete calls, and all text."""
    calls, text, open_call = [], "", None
    for event in events:
        if isinstance(event, Begin):
            assert open_call is None
            open_call = (event.name, "")
        elif isinstance(event, Arguments):
            open_call = (open_call[0], open_call[1] + event.text)
        elif isinstance(event, End):
            calls.append((open_call[0], json.loads(open_call[1])))
            open_call = None
        else:
            text += event.text
            open_call = None if isinstance(event, Broken) else open_call
    return calls, text


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize(("template", "text", "calls"), CASES.values(), ids=CASES)
def test_calls_are_found(template, text, calls, size):
    assert calls_of(read(template, text, size)) == (calls, "")
    assert calls_of(read(template, f"Let me look.\n\n{text}", size)) == (calls, "Let me look.")
    thought = f"<think>First {text[:12]}...</think>\n"
    assert calls_of(read(template, thought + text, size)) == (calls, thought.rstrip())
    assert calls_of(read(template, thought[7:] + text, size, thinking=True)) == (calls, thought[7:].rstrip())


@pytest.mark.parametrize("size", [1, 10_000])
@pytest.mark.parametrize(("template", "text", "calls"), CASES.values(), ids=CASES)
def test_what_is_cut_off_is_text(template, text, calls, size):
    """At any character: what was complete before stays a call, all the rest is text."""
    for end in range(len(text)):
        found, rest = calls_of(read(template, text[:end], size))
        assert found == calls[: len(found)]
        if not found:
            assert rest == text[:end]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (HERMES, "<tool_call>\nnothing\n</tool_call> and more"),
        (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": Rome}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "weather", "arguments": "Rome"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "weather", "arguments": {}, "more": 1}</tool_call>'),
        (HERMES, '<tool_call>[{"name": "weather"}]</tool_call>'),
        (HERMES, 'a <tool_cal and {"name": "weather", "arguments": {}}  \n'),
        (XML, "<tool_call>\n<function=unknown>\n</function>\n</tool_call>"),
        (XML, "<tool_call>\n<function=weather>\ncity: Rome\n</function>\n</tool_call>"),
        (GLM, "<tool_call>weather\n<arg_key>city</arg_key>Rome</tool_call>"),
        (V31, deepseek(("unknown", "{}"))),
        (V31, deepseek(("weather", "[1]"))),
        (HARMONY, "<|start|>assistant to=functions.weather<|channel|>commentary<|message|>Rome<|call|>"),
    ],
)
@pytest.mark.parametrize("size", [1, 10_000])
def test_what_is_no_call_comes_back_as_it_stood(template, text, size):
    assert calls_of(read(template, text, size)) == ([], text)


def test_a_call_after_a_broken_one_is_found():
    good = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    calls, text = calls_of(read(HERMES, f"<tool_call>oh\n{good}", 3))
    assert (calls, text) == ([("get_time", {})], "<tool_call>oh")


def test_the_name_comes_first_and_arguments_as_they_are_written():
    reader = CallReader(form_of(HERMES), TOOLS)
    assert reader.push('Hm. <tool_call>\n{"name": "weather", "arguments": {"city": "Ro') == [
        Text("Hm."), Begin("weather"), Arguments('{"city": "Ro'),
    ]  # fmt: skip
    assert reader.push('me"') == [Arguments('me"')]
    assert reader.push("}}\n</tool_call>") == [Arguments("}"), End()]
    assert reader.close() == []


def test_a_template_that_shows_no_call_has_no_form():
    assert form_of("{{ messages }}{{ tools | tojson }}") is None


def test_a_tool_that_the_template_leaves_out_is_a_fault():
    def chat(source):
        return Chat(render=Template({"default": source}, special={}, where="template"))

    tools = [{"type": "function", "function": {"name": name}} for name in ("first", "second")]
    said = "{{ messages[0].content }}"
    whole = chat(said + "{{ tools | tojson }}").prompt([{"role": "user", "content": "x"}], tools=tools)
    assert whole == "x" + json.dumps(tools)
    with pytest.raises(PromptError, match=r"tools\[1\] does not appear in the prompt"):
        chat(said + "{{ tools[0].function.name }}").prompt([{"role": "user", "content": "x"}], tools=tools)


FUNCTION = {"name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([3], r"tools\[0\] must be"),
        ([{"type": "retrieval"}], r"tools\[0\] must be"),
        ([{"type": "function", "function": {}}], r"tools\[0\].function.name must be"),
        ([{"type": "function", "function": {"name": "a b"}}], r"tools\[0\].function.name must be"),
        ([{"type": "function", "function": FUNCTION}] * 2, r"tools\[1\].function.name f is another"),
        ([{"type": "function", "function": FUNCTION | {"description": 3}}], r"tools\[0\].function.description"),
        ([{"type": "function", "function": FUNCTION | {"parameters": []}}], r"tools\[0\].function.parameters"),
        ([{"type": "function", "function": FUNCTION | {"strict": True}}], r"tools\[0\].function.strict is not"),
        ([{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)], "at most 128, got 129"),
    ],
)
def test_tools_are_checked(tools, words):
    with pytest.raises(PromptError, match=words):
        check_tools(tools)


class Words:
    """Every word is a token, and so is every mark of Harmony."""

    vocab = 1 << 16

    def __init__(self):
        self.words = []

    def encode(self, text, *, add_special_tokens=True):
        import re

        found = re.findall(r"<\|\w+\|>|[^<]|<", text)
        self.words += [word for word in found if word not in self.words]
        return [self.words.index(word) for word in found]

    def decode(self, tokens):
        return "".join(word for token in tokens if not (word := self.words[token]).startswith("<|"))


@pytest.mark.parametrize(
    "header",
    [" to=functions.weather<|channel|>commentary<|constrain|>json", "<|channel|>commentary to=functions.weather "],
)
def test_harmony_calls_are_read_from_tokens(header):
    tokenizer = Words()
    reply = harmony.Reply(tokenizer=tokenizer, context=tokenizer.encode("<|start|>assistant"), calls=True)
    reader = CallReader(form_of(HARMONY), TOOLS)
    said = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{header}<|message|>{ARGUMENTS}"
    text = "".join(reply.push(token) for token in tokenizer.encode(said)) + reply.close()
    assert calls_of(reader.push(text) + reader.close()) == ([WEATHER], "")
    assert (reply.reasoning, reply.text) == ("Hm.", text)
    silent = harmony.Reply(tokenizer=tokenizer, context=tokenizer.encode("<|start|>assistant"))
    assert "".join(silent.push(token) for token in tokenizer.encode(said)) + silent.close() == ""
