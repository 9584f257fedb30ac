"""The environment that Hugging Face chat templates are written for, in which nothing escapes and everything ends.

A template comes with a model, so it is foreign code. Jinja's own sandbox, the one that transformers uses, keeps it from
Python's internals and from changing what it is given; here all work is metered. Operators, calls, filters, tests and
printed values have hooks in Jinja; loops, literals, slices, comparisons and `~` have none, so in those places the
parsed template is rewritten to call `turn`, `weighed` and `concatenated`. What could not be bounded is refused by name:
a few filters of Jinja's and methods of Python's that no chat template needs.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from ingot.text.chat_template.render_limits import (
    FILTERS,
    FUNCTIONS,
    OPERATORS,
    TESTS,
    UNBOUNDED_METHODS,
    bound_string_method,
)
from ingot.text.template.meter import current

_BOUND = (types.MethodType, types.BuiltinMethodType)
_REFUSED_TAGS: dict[type[nodes.Node], str] = {
    nodes.Include: "include",
    nodes.Import: "import",
    nodes.FromImport: "from",
    nodes.Extends: "extends",
    nodes.ScopedEvalContextModifier: "autoescape",
}


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles and runs one model's templates. Whoever does either sets `meter.current` first."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
            finalize=_printed,
        )
        self.filters = dict(FILTERS)
        self.tests = dict(TESTS)
        del self.globals["lipsum"]
        self.globals.update(FUNCTIONS, namespace=PublicNamespace)

    def compiled(self, tree: nodes.Template) -> Callable[..., Iterator[str]]:
        """The generating function of a parsed template: called with its variables, it yields pieces of text."""
        rewritten = _Rewriter().visit(tree)
        rewritten.set_environment(self)
        return self.from_string(rewritten).generate

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = current.get()
        meter.step()
        if isinstance(__obj, _BOUND):
            if __obj.__name__ in UNBOUNDED_METHODS:
                raise SecurityError(f"it calls {__obj.__name__!r}")
            if isinstance(__obj.__self__, str):
                args = bound_string_method(__obj.__self__, __obj.__name__, args, kwargs)
        return meter.admit(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            current.get().step()  # hashing one takes as long as it is, every time
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        return None if wrapped is None else _bounded_format(self, value.__self__, wrapped.__name__ == "format_map")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = current.get()
        meter.step()
        if operator in OPERATORS:
            OPERATORS[operator](meter, left, right)
        return meter.admit(self.binop_table[operator](left, right))

    def turn(self, written: int) -> bool:
        """One turn of a loop, which writes this many characters of the template's own text."""
        current.get().charge(written)
        return True

    def weighed(self, value: Any) -> Any:
        return value  # being called is what weighs it

    def concatenated(self, *values: Any) -> str:
        meter = current.get()
        texts = [meter.text(value) for value in values]
        meter.room(sum(map(len, texts)))
        return "".join(texts)


class PublicNamespace(Namespace):
    """A namespace without private names, some of which Python would take for instructions."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _refuse_private(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class _BoundedFormatter(SandboxedFormatter):
    """`'{}'.format(...)`, whose fields are steps and whose text is bounded before it is made."""

    def __init__(self, env: Sandbox, **options: Any) -> None:
        super().__init__(env, **options)
        self._size = 0

    def parse(self, format_string: str) -> Iterator[Any]:
        for field in super().parse(format_string):
            current.get().step()
            yield field

    def convert_field(self, value: Any, conversion: Any) -> Any:
        current.get().text(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        meter = current.get()
        # Width and precision are the only numbers there; more digits than these are beyond any limit.
        stated = sum(int(digits[:12]) for digits in re.findall(r"\d+", format_spec))
        meter.room(self._size + stated)
        made = super().format_field(value, format_spec)
        self._size += len(made)
        meter.room(self._size)
        return made


class _BoundedEscapeFormatter(_BoundedFormatter, SandboxedEscapeFormatter):
    """The same for text that was marked as safe."""


def _bounded_format(sandbox: Sandbox, pattern: str, mapped: bool) -> Callable[..., str]:
    def format(*args: Any, **kwargs: Any) -> str:
        made: _BoundedFormatter = _BoundedFormatter(sandbox)
        if isinstance(pattern, Markup):
            made = _BoundedEscapeFormatter(sandbox, escape=pattern.escape)
        if mapped:
            [kwargs], args = args, ()
        return type(pattern)(made.vformat(pattern, args, kwargs))

    return format


class GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Rewriter(NodeTransformer):
    """Puts a metered call wherever a template could otherwise work without one."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        if type(node) in _REFUSED_TAGS:
            raise TemplateSyntaxError(
                f"the tag {_REFUSED_TAGS[type(node)]!r} is not supported in chat templates", node.lineno
            )
        return super().visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        written = sum(map(len, _own_text(node.body)))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("turn", nodes.Const(written), line=node.lineno)))
        if node.test is not None:
            node.test = nodes.And(_call("turn", nodes.Const(0), line=node.lineno), node.test)
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, "string", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenated", *node.nodes, line=node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._weighed(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._weighed(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._weighed(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        if isinstance(node.arg, nodes.Slice):
            return self._weighed(node)
        return self.generic_visit(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        equality = all(operand.op in ("eq", "ne") for operand in node.ops)
        self.generic_visit(node)
        if equality and any(isinstance(side, nodes.Const) for side in sides):
            return node  # no dearer than the constant is long
        return nodes.And(_call("turn", nodes.Const(0), line=node.lineno), node, lineno=node.lineno)

    def _weighed(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _call("weighed", node, line=node.lineno)


def _call(name: str, *args: nodes.Expr, line: int) -> nodes.Call:
    method = nodes.EnvironmentAttribute(name, lineno=line)
    return nodes.Call(method, list(args), [], None, None, lineno=line)


def _own_text(body: list[nodes.Node]) -> Iterator[str]:
    """The literal text in a loop's body, but for that of loops within it, which pay for themselves."""
    for node in body:
        if isinstance(node, nodes.TemplateData):
            yield node.data
        elif not isinstance(node, nodes.For):
            yield from _own_text(list(node.iter_child_nodes()))


def _printed(value: Any) -> str:
    meter = current.get()
    text = meter.text(value)
    meter.charge(len(text))
    return text


def _refuse_private(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"it keeps a private name, {name!r}, in a namespace")
