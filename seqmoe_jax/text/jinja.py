"""Jinja for templates that nobody has read: what transformers gives a chat template, within bounds of time and size.

Jinja's sandbox keeps a template from Python's insides, but not from `'a' * 10**9` or from loops in loops. Here every
operation by which a template makes something is counted against the budget of its rendering before it is done: the
operators, calls, filters and literals, each turn of a loop, each text that is put out. The rules are in
`seqmoe_jax.text.budget`; this module has the places where they apply.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from seqmoe_jax.text import budget

_REMOVED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")  # slow or growing, and never in chats
# Of texts, lists, objects and numbers: those whose cost `budget` knows.
_METHODS = frozenset((
    "capitalize", "casefold", "center", "copy", "count", "endswith", "find", "format", "get", "index", "isalnum",
    "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace",
    "istitle", "isupper", "items", "join", "keys", "ljust", "lower", "lstrip", "partition", "removeprefix",
    "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines",
    "startswith", "strip", "swapcase", "title", "upper", "values", "zfill", "is_integer", "bit_length",
))  # fmt: skip


def variables(source: str) -> frozenset[str]:
    """Names that a template reads and does not set. Raises whatever Jinja raises for what is no template."""
    environment = BoundedEnvironment()
    return frozenset(meta.find_undeclared_variables(environment.parse(source))).difference(environment.globals)


def render(template: jinja2.Template, values: Mapping[str, Any]) -> str:
    """The text of a template of a `BoundedEnvironment`. Raises `budget.Exhausted`, and whatever templates raise."""
    with budget.rendering(values):
        return template.render(values)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of transformers' `_compile_jinja_template`, whose operations are counted."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_put_out,
            optimized=False,  # what is constant is not computed while compiling, when there is no budget
        )  # fmt: skip
        self.globals |= {"raise_exception": _raise, "strftime_now": _now, "namespace": _Namespace}
        del self.globals["lipsum"]
        self.filters["tojson"] = _tojson  # Jinja's own escapes HTML
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters = {name: _counted_filter(name, function) for name, function in self.filters.items()}
        self.tests = {name: _counted_test(function) for name, function in self.tests.items()}
        self.filters |= {"_made": budget.made, "_turns": _turns, "_joined": _joined, "_constant": _constant}

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Counting().visit(source), *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        method = isinstance(value, BuiltinMethodType) or (isinstance(obj, str) and callable(value))
        return super().is_safe_attribute(obj, attr, value) and (not method or attr in _METHODS)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            budget.check_format(value.__self__, (args, kwargs), "{")
            return wrapped(*args, **kwargs)

        return checked

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget.check_operator(operator, left, right)
        return budget.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(__obj, BuiltinMethodType):
            args = budget.check_call(__obj.__name__, (__obj.__self__, *args), kwargs)[1:]
        elif not isinstance(__obj, Macro):
            budget.check_call("", args, kwargs)
        return budget.made(super().call(__context, __obj, *args, **kwargs))


class _Counting(NodeTransformer):
    """Puts a counting filter around what is no operator, call or filter."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _through("_turns", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through("_joined", nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _through("_made", node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _through("_made", node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through("_made", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        if constant := sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData)):
            node.nodes.append(_through("_constant", nodes.Const(constant, lineno=node.lineno)))
        return node


def _through(name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}`: marks what an assistant said, for training; here its inside alone matters."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("inside"), [], [], body).set_lineno(line)

    def inside(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """Namespaces that hold each other would be printed for ever."""

    def __repr__(self) -> str:
        raise jinja2.exceptions.SecurityError("a namespace cannot be printed")


def _counted_filter(name: str, function: Any) -> Callable[..., Any]:
    passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or the like goes before the value

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        checked = budget.check_call(name, args[passed:], kwargs)
        return budget.made(function(*args[:passed], *checked, **kwargs))

    return counted


def _counted_test(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        budget.spend(0)
        return function(*args, **kwargs)

    return counted


@jinja2.pass_context
def _put_out(context: Context, value: Any) -> Any:
    """What `{{ }}` puts out, before it becomes text."""
    budget.spend(budget.size(value))
    return value


def _turns(iterable: Iterable[Any]) -> Iterator[Any]:
    for item in iterable:
        budget.spend(64)
        yield item


def _joined(parts: list[Any]) -> str:
    """The operator `~`."""
    budget.spend(budget.size(parts))
    return "".join(map(str, parts))


def _constant(length: int) -> str:
    """Beside a constant text of the template, wherever it is put out."""
    budget.spend(length)
    return ""


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    budget.check_format(form, (), "%")
    return datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
