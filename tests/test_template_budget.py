"""A chat template from anywhere ends in time and in memory, in one line, and never reaches Python."""

import resource
import subprocess
import sys
from contextlib import suppress

import pytest

from seqmoe_jax.errors import ConfigError, PromptError
from seqmoe_jax.text import budget
from seqmoe_jax.text.chat import Chat
from seqmoe_jax.text.template import Template

HELLO = [{"role": "user", "content": "Hello"}]


def render(source, messages=HELLO, **options):
    return Template({"default": source}, special={}, where="template")(messages, **options)


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"


def grown(start, step):
    return "{% set ns = namespace(x=" + start + ") %}{% for i in range(60) %}{% set ns.x = " + step + " %}{% endfor %}"


HOSTILE = {
    "loops": LOOP,
    "filtered loops": "{% for i in range(99999) if (range(99999) | list | length) == 1 %}{% endfor %}",
    "loops over what is skipped": LOOP.replace(") %}BODY", ") if j < 0 %}"),
    "loops that compare": LOOP.replace("BODY", "{% if messages == messages %}{% endif %}"),
    "loops that put out": LOOP.replace("BODY", "x" * 2000),
    "loops in a block": "{% set x %}" + LOOP.replace("BODY", "x" * 2000) + "{% endset %}",
    "loops in a macro": "{% macro m() %}" + "x" * 5000 + "{% endmacro %}" + LOOP.replace("BODY", "{% set y = m() %}"),
    "tests in maps": LOOP.replace("BODY", "{% set y = range(99999) | select('in', 'x' * 9999) | list %}"),
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "recursion in two": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "recursive loops": "{% for x in [[1, 2, 3]] recursive %}{{ loop([[1, 2, 3], [1, 2, 3]]) }}{% endfor %}",
    "repeated text": "{{ 'a' * 10**9 }}",
    "repeated text the other way": "{{ 10**9 * 'a' }}",
    "repeated list": "{{ [0] * 10**9 }}",
    "repeated list, unseen": "{% set x = [messages] * 10**9 %}",
    "constant": "{% set x = 'a' * 999999999 %}",
    "power": "{{ 2 ** 1000000000 }}",
    "digits": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "width of %": "{{ '%1000000000d' % 1 }}",
    "width of % as an argument": "{{ '%*d' % (1000000000, 1) }}",
    "precision of %": "{{ '%.1000000000f' % 1.5 }}",
    "width of format": "{{ '{:1000000000d}'.format(1) }}",
    "width of format as an argument": "{{ '{:{}}'.format(1, 1000000000) }}",
    "filter format": "{{ '%1000000000d' | format(1) }}",
    "format of much": "{% set x = 'a' * 9999999 %}{{ ('{0}' * 9999).format(x) }}",
    "% of much": "{% set x = 'a' * 9999999 %}{{ ('%(x)s' * 9999) % {'x': x} }}",
    "center": "{{ 'a' | center(10**9) }}",
    "method center": "{{ 'a'.center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ '1'.zfill(10**9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "indent": "{{ ('a\n' * 99999) | indent(99999) }}",
    "indent by text": "{{ ('a\n' * 99999) | indent('b' * 99999) }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "replace": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "method replace": "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "join": "{{ range(99999) | join('b' * 99999) }}",
    "method join": "{{ ('b' * 99999).join(['a'] * 99999) }}",
    "join of a map": "{{ range(99999) | map('string') | join('b' * 99999) }}",
    "tojson": "{{ [[[[1] * 9] * 9] * 99] * 99 | tojson(indent=99999) }}",
    "tojson of objects": "{{ ([{'a': 'b' * 999999}] * 9999) | tojson }}",
    "sum of lists": "{{ ([[0] * 999] * 9999) | sum(start=[]) }}",
    "lipsum": "{{ lipsum(10**6) }}",
    "bytes of a number": "{{ (1).to_bytes(10**9, 'big') }}",
    "doubled text": grown("'ab'", "ns.x + ns.x"),
    "doubled text by ~": grown("'ab'", "ns.x ~ ns.x"),
    "doubled list": grown("[1]", "ns.x + ns.x"),
    "doubled blocks": grown("'ab'", "ns.x %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y"),
    "lists in lists": grown("[1]", "[ns.x, ns.x]") + "{{ ns.x }}",
    "lists in lists, compared": grown("[1]", "[ns.x, ns.x]") + "{{ ns.x == ns.x[:] }}",
    "objects in objects": grown("1", "dict(a=ns.x, b=ns.x)") + "{{ ns.x | tojson }}",
    "tuples in tuples": grown("1", "(ns.x, ns.x)") + "{{ ns.x | string }}",
    "namespaces in namespaces": grown("1", "namespace(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "kept copies": "{% set ns = namespace(x=[]) %}{% set big = 'a' * 9999999 %}{% for i in range(99999) %}"
    "{% set ns.x = ns.x + [big[i:]] %}{% endfor %}",
    "many digits put out": "{{ (2 ** 4000) * (2 ** 4000) }}",
    "date": "{{ strftime_now('%1000000000Y' * 999) }}",
    "unknown": "{{ messages.mro() }}",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_one_line(name, monkeypatch):
    monkeypatch.setattr(budget, "SECONDS", 0.2)
    monkeypatch.setattr(budget, "BYTES", 32 << 20)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((PromptError, ConfigError)) as error:
        render(HOSTILE[name])
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 8 * budget.BYTES >> 10  # KiB


def test_checking_a_conversation_takes_no_longer_than_one_rendering(monkeypatch):
    """A slow template that shows no message as it came would otherwise be rendered once for each of them."""
    monkeypatch.setattr(budget, "SECONDS", 0.3)
    slow = (
        "{% for i in range(200) %}{% for j in range(200) %}{% set x = i * j %}{% endfor %}{% endfor %}"
        "{% for m in messages %}{{ m.content[:1] }}{% endfor %}"
    )
    template, done = Template({"default": slow}, special={}, where="template"), []
    chat = Chat(render=lambda messages: done.append(template(messages)) or done[-1])
    with suppress(PromptError):
        chat.prompt([{"role": "user", "content": str(i)} for i in range(9999)])
    assert len(done) < 5000


COMPILED = {
    "parentheses": "{{ " + "(" * 50000 + "1" + ")" * 50000 + " }}",
    "sums": "{{ " + "1 + " * 50000 + "1 }}",
    "nots": "{{ " + "not " * 50000 + "1 }}",
    "nested ifs": "{% if 1 %}" * 9000 + "{% endif %}" * 9000,
    "nested loops": "{% for x in y %}" * 30 + "{% endfor %}" * 30,
    "elifs": "{% if 0 %}" + "{% elif 0 %}" * 15000 + "{% endif %}",
    "lists": "{{ " + "[" * 50000 + "]" * 50000 + " }}",
    "digits": "{{ " + "9" * 90000 + " }}",
    "attributes": "{{ x" + ".x" * 50000 + " }}",
    "filters": "{{ x" + "|e" * 50000 + " }}",
    "length": "x" * (1 << 20),
}


def test_a_template_that_cannot_be_compiled_is_one_line_and_no_crash():
    """In a process of their own: a stack that overflows takes its process with it."""
    script = (
        "import sys, tests.test_template_budget as t\n"
        "for name, source in t.COMPILED.items():\n"
        "    try: t.render(source); print('fine')\n"
        "    except (t.PromptError, t.ConfigError) as error: print(name, str(error)[:200].count(chr(10)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    assert (done.returncode, len(lines)) == (0, len(COMPILED)), done.stderr[-500:]
    assert all(line == "fine" or line.endswith(" 0") for line in lines), lines
    assert lines[-1] == "length 0"


def test_what_real_templates_do_is_within_the_budget():
    """A conversation of hundreds of messages, and a long one, through what templates do most."""
    source = (
        "{% set ns = namespace(system='', seen=[], last=-1) %}"
        "{% macro text(content) %}{% if content is string %}{{ content | trim }}{% endif %}{% endmacro %}"
        "{% for m in messages[::-1] %}"
        "{% if m.role == 'user' and ns.last < 0 %}{% set ns.last = loop.index0 %}{% endif %}"
        "{% endfor %}{% for m in messages %}{% set ns.seen = ns.seen + [m.role] %}"
        "{% if loop.index0 < messages | length %}{{ '<' + m.role + '>' + text(m.content) + '</' ~ m.role ~ '>\n' }}"
        "{{ m.content.split('</think>')[-1] | replace('x', 'y') | indent(2) }}{{ m | tojson(indent=2) }}{% endif %}"
        "{{ '%-10s' | format(m.role) }}{{ 'a'.center(20) }}{{ loop.cycle('a', 'b') }}{% endfor %}"
    )
    messages = [
        {"role": role, "content": f"{i} " + "word " * 300} for i in range(200) for role in ("user", "assistant")
    ]
    assert len(render(source, messages)) > 1_000_000
    assert len(render(source, [{"role": "user", "content": "word " * 200_000}])) > 2_000_000
