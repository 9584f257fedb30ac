"""The environment that Hugging Face chat templates are written for, in which nothing escapes and everything ends.

A template comes with a model, so it is foreign code. Jinja's own sandbox keeps it from Python's internals; here, what
may be called is a list of names instead of everything that is not forbidden, and all work is metered. Operators,
calls, filters, tests and printed values have hooks in Jinja; loops, literals, slices, comparisons and `~` have none,
so in those places the parsed template is rewritten to call `turn`, `weighed` and `concatenated`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from ingot.text.template.filters import FILTERS, FUNCTIONS, OPERATORS, TESTS, bound_string_method
from ingot.text.template.meter import current

_STRING_METHODS = """
    capitalize casefold center count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier
    islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix
    replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill
"""
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, frozenset(_STRING_METHODS.split())),
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    (list, frozenset({"copy", "count", "index"})),
    (tuple, frozenset({"count", "index"})),
    (float, frozenset({"is_integer"})),
    (LoopContext, frozenset({"changed", "cycle"})),
    (Cycler, frozenset({"next", "reset"})),
)
_BOUND = (types.MethodType, types.BuiltinMethodType)
_REFUSED_TAGS: dict[type[nodes.Node], str] = {
    nodes.Include: "include",
    nodes.Import: "import",
    nodes.FromImport: "from",
    nodes.Extends: "extends",
    nodes.Block: "block",
    nodes.ScopedEvalContextModifier: "autoescape",
}


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles and runs one model's templates. Whoever does either sets `meter.current` first."""

    intercepted_binops = frozenset(OPERATORS)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
            finalize=_printed,
        )
        self.filters = dict(FILTERS)
        self.tests = dict(TESTS)
        self.globals = {**FUNCTIONS, "namespace": PublicNamespace, "cycler": Cycler, "joiner": Joiner}
        self._callables = {self.turn, self.weighed, self.concatenated, *self.globals.values()}

    def compiled(self, tree: nodes.Template) -> Callable[..., Iterator[str]]:
        """The generating function of a parsed template: called with its variables, it yields pieces of text."""
        rewritten = _Rewriter().visit(tree)
        rewritten.set_environment(self)
        return self.from_string(rewritten).generate

    def is_safe_callable(self, obj: Any) -> bool:
        if isinstance(obj, (Macro, LoopContext, Joiner, Undefined)):
            return True
        if isinstance(obj, Hashable) and obj in self._callables:
            return True
        if not isinstance(obj, _BOUND):
            return False
        return any(isinstance(obj.__self__, kind) and obj.__name__ in names for kind, names in _METHODS)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = current.get()
        meter.step()
        if not __self.is_safe_callable(__obj):
            raise SecurityError(f"it calls {_name(__obj)!r}")
        if isinstance(__obj, _BOUND) and isinstance(__obj.__self__, str):
            args = bound_string_method(__obj.__self__, __obj.__name__, args)
        return meter.admit(__context.call(__obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = current.get()
        meter.step()
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


def _name(obj: Any) -> str:
    return obj.__name__ if isinstance(obj, (*_BOUND, types.FunctionType, type)) else type(obj).__name__
