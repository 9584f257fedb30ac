"""The sandbox that chat templates run in, and the trace that a rendering leaves.

A template comes with a model, so it is untrusted code. Jinja's sandbox, the one that transformers uses, keeps it from
Python's internals and from changing its inputs; its work is limited as well (`render_limits`).

A `RenderTrace` records where in the text each message stands: a loop whose item is one of the messages marks where each
begins. It also decides which turns keep their thinking. Templates leave out the thinking of earlier turns by asking
whether a message comes after the newest question, or by splitting its content where the thinking ends. Both can be made
to depend on the message alone, so that it is rendered the same in every later turn. Likewise, a loop does not look
through what follows a message to decide what is shown of it, and what a template would show with the newest question,
as some do with tools, is shown with the first.
"""

from __future__ import annotations

import re
import secrets
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from ingot.text.chat_template.render_limits import FILTERS, FUNCTIONS, OPERATORS, TESTS, bound_method, current_budget
from ingot.text.chat_template.traits import REASONING_KEYS

_METHODS = (types.MethodType, types.BuiltinMethodType)
_REFUSED_TAGS: dict[type[nodes.Node], str] = {
    nodes.Include: "include",
    nodes.Import: "import",
    nodes.FromImport: "from",
    nodes.Extends: "extends",
    nodes.ScopedEvalContextModifier: "autoescape",
}


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles and runs one model's templates, with `current_budget` set, and `current_trace` to render."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
            finalize=_print_value,
        )
        self.filters = dict(FILTERS)
        self.tests = dict(TESTS)
        del self.globals["lipsum"]
        self.globals.update(FUNCTIONS, namespace=PublicNamespace)

    def compiled(self, tree: nodes.Template) -> Callable[..., Iterator[str]]:
        """The generating function of a parsed template: called with its variables, it yields pieces of text."""
        if (tag := tree.find(cast(Any, tuple(_REFUSED_TAGS)))) is not None:
            name = _REFUSED_TAGS[type(tag)]
            raise TemplateSyntaxError(f"the tag {name!r} is not supported in chat templates", tag.lineno)
        rewritten = _BudgetRewriter().visit(tree)
        rewritten.set_environment(self)
        return self.from_string(rewritten).generate

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = current_budget.get()
        budget.step()
        if isinstance(__obj, _METHODS):
            args = bound_method(budget, __obj, args, kwargs)
        return budget.admit(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            current_budget.get().step()  # hashing one takes as long as it is, every time
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        pattern: str = value.__self__

        def format(*args: Any, **kwargs: Any) -> str:
            made: _BoundedFormatter = _BoundedFormatter(self)
            if isinstance(pattern, Markup):
                made = _BoundedEscapeFormatter(self, escape=pattern.escape)
            if value.__name__ == "format_map":
                [kwargs], args = args, ()
            return type(pattern)(made.vformat(pattern, args, kwargs))

        return format

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = current_budget.get()
        budget.step()
        if operator in OPERATORS:
            OPERATORS[operator](budget, left, right)
        return budget.admit(self.binop_table[operator](left, right))

    def turn(self, written: int) -> bool:
        """One turn of a loop, which writes this many characters of the template's own text."""
        current_budget.get().charge(written)
        return True

    def weigh(self, value: Any) -> Any:
        return value  # calling it is what charges the budget

    def trace(self, question: str, *args: Any) -> Any:
        """The answer of this rendering's trace: `question` is one of its methods."""
        return getattr(current_trace.get(), question)(*args)


class PublicNamespace(Namespace):
    """A namespace without private names, some of which Python would take for instructions."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"it keeps a private name, {name!r}, in a namespace")
        super().__setitem__(name, value)


class _BoundedFormatter(SandboxedFormatter):
    """`'{}'.format(...)`, whose fields are steps and bounded before they are made."""

    def parse(self, format_string: str) -> Iterator[Any]:
        return current_budget.get().stepped(super().parse(format_string))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        current_budget.get().text(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        budget = current_budget.get()
        # Width and precision are the only numbers there; more digits than these are beyond any limit.
        budget.room(sum(int(digits[:12]) for digits in re.findall(r"\d+", format_spec)))
        made = super().format_field(value, format_spec)
        budget.charge(len(made))
        return made


class _BoundedEscapeFormatter(_BoundedFormatter, SandboxedEscapeFormatter):
    """The same for text that was marked as safe."""


class GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _BudgetRewriter(NodeTransformer):
    """Puts a metered call wherever a template could otherwise work without one."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        texts = (text.data for inner in node.body for text in inner.find_all(nodes.TemplateData))
        written = nodes.Const(sum(map(len, texts)))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(environment_call("turn", written, line=node.lineno)))
        if node.test is not None:
            node.test = nodes.And(environment_call("turn", nodes.Const(0), line=node.lineno), node.test)
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, "string", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "join", [], [], None, None, lineno=node.lineno)

    def visit_List(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return environment_call("weigh", node, line=node.lineno)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self.visit_List(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        return self.visit_List(node) if isinstance(node.arg, nodes.Slice) else self.generic_visit(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        equality = all(operand.op in ("eq", "ne") for operand in node.ops)
        self.generic_visit(node)
        if equality and any(isinstance(operand, nodes.Const) for operand in operands):
            return node  # no dearer than the constant is long
        return nodes.And(environment_call("turn", nodes.Const(0), line=node.lineno), node, lineno=node.lineno)


def environment_call(name: str, *args: nodes.Expr, line: int) -> nodes.Call:
    """A call of a method of the sandbox's own."""
    return nodes.Call(nodes.EnvironmentAttribute(name, lineno=line), list(args), [], None, None, lineno=line)


def _print_value(value: Any) -> str:
    budget = current_budget.get()
    text = budget.text(value)
    budget.charge(len(text))
    return text


# `official`: as the template has it. `stable`: a message is rendered the same whatever follows it.
TemplateHistory = Literal["stable", "official"]

_POSITIONS = ("index", "index0")
_MESSAGE_MARK = re.compile("\ue000([0-9a-f]{16}):(-|[0-9]+)\ue001")
"""Of any trace: a pattern with one trace's nonce would have to be compiled for each prompt."""


@dataclass(frozen=True, slots=True)
class TextRun:
    """A run of the text: the template's own, or that of the message at this index."""

    message: int | None
    text: str


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt's text in pieces. The last one, which follows all messages, is what opens the answer."""

    pieces: tuple[TextRun, ...]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class ThinkingContent(str):
    """An assistant's content with its thinking in front, which a template must not cut off."""

    __slots__ = ()


class RenderTrace:
    """Of one rendering. Knows the messages by identity, as templates hand the very same objects from list to list."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], history: TemplateHistory) -> None:
        self._messages = messages  # referenced, so that no other object can get the same id
        self._indices = {id(message): index for index, message in enumerate(messages)}
        self._history = history
        self._nonce = secrets.token_hex(8)
        self._loop: int | None = None  # the loop whose items are being rendered

    def begin(self, item: Any, loop: int) -> str:
        index = self._indices.get(id(item))
        if index is None or self._loop not in (None, loop):
            return ""
        self._loop = loop
        return self._mark(str(index))

    def over(self, loop: int) -> str:
        if self._loop != loop:
            return ""
        self._loop = None
        return self._mark("-")

    def recent(self, official: Any, after: bool, item: Any) -> Any:
        if self._history == "official" or id(item) not in self._indices or item.get("role") != "assistant":
            return official
        return after == has_reasoning(item)

    def newest(self, official: Any, item: Any) -> Any:
        if self._history == "official" or id(item) not in self._indices or item.get("role") != "user":
            return official
        return item is next(message for message in self._messages if message.get("role") == "user")

    def visible(self, content: Any, official: Any) -> Any:
        return content if isinstance(content, ThinkingContent) else official

    def following(self, official: Any, item: Any) -> Any:
        stops = self._history == "stable" and id(item) in self._indices and item.get("role") == "assistant"
        return () if stops else official

    def read(self, marked: str) -> RenderedPrompt:
        """The pieces of a text with the marks in it."""
        pieces: list[TextRun] = []
        index, begin = None, 0
        for mark in _MESSAGE_MARK.finditer(marked):
            if mark[1] != self._nonce:
                continue  # a message wrote it
            pieces.append(TextRun(index, marked[begin : mark.start()]))
            index, begin = None if mark[2] == "-" else int(mark[2]), mark.end()
        pieces.append(TextRun(index, marked[begin:]))
        return RenderedPrompt(tuple(pieces))

    def _mark(self, name: str) -> str:
        return f"\ue000{self._nonce}:{name}\ue001"


current_trace: ContextVar[RenderTrace] = ContextVar("trace")


def has_reasoning(message: Mapping[str, Any]) -> bool:
    """Whether an assistant's message has its thinking, in a key of its own or at the front of its content."""
    if any(isinstance(message.get(key), str) and message[key].strip() for key in REASONING_KEYS):
        return True
    content = message.get("content")
    return isinstance(content, str) and "</think>" in content


class TraceRewriter(NodeTransformer):
    """Adds calls of the trace to a parsed template, which it changes."""

    def __init__(self, tree: nodes.Template) -> None:
        made = {
            each.target.name: each.node for each in tree.find_all(nodes.Assign) if isinstance(each.target, nodes.Name)
        }
        self._aliases = {name for name, value in made.items() if _is_position(value, ())}
        self._variables = set(made)
        # What a loop notes in a namespace, such as where it met the newest question.
        self._variables |= {
            f"{target.name}.{target.attr}" for loop in tree.find_all(nodes.For) for target in loop.find_all(nodes.NSRef)
        }
        self._loops = 0
        self._item: str | None = None  # the variable of the innermost loop

    def visit_For(self, node: nodes.For) -> nodes.Node | list[nodes.Node]:
        outer, self._item = self._item, node.target.name if isinstance(node.target, nodes.Name) else None
        item = self._item
        self.generic_visit(node)
        self._item = outer
        line = node.lineno
        if outer is not None and _is_following_messages(node.iter) and not node.find(nodes.Output):
            node.iter = _trace_call("following", cast(nodes.Expr, node.iter), _load(outer, line), line=line)
        if item is None:
            return node
        self._loops += 1
        loop = nodes.Const(self._loops)
        node.body.insert(0, _trace_output("begin", _load(item, line), loop, line=line))
        return [node, _trace_output("over", loop, line=line)]

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if self._item is None or len(node.ops) != 1:
            return node
        item = _load(self._item, node.lineno)
        if (after := self._asks_whether_after(node)) is not None:
            return _trace_call("recent", node, nodes.Const(after), item, line=node.lineno)
        if self._asks_whether_newest(node):
            return _trace_call("newest", node, item, line=node.lineno)
        return node

    def visit_And(self, node: nodes.And) -> nodes.Node:
        """`loop.last and system_message is defined`: the system message goes into the newest question."""
        self.generic_visit(node)
        set_here = isinstance(node.right, nodes.Test) and _variable_name(node.right.node) in self._variables
        if self._item is not None and set_here and _is_loop(node.left, ("last",)):
            node.left = _trace_call("newest", node.left, _load(self._item, node.lineno), line=node.lineno)
        return node

    def _asks_whether_newest(self, node: nodes.Compare) -> bool:
        """`message == user_messages[-1]`: what stands there goes with the newest question."""
        operands = (node.expr, node.ops[0].expr)
        return node.ops[0].op == "eq" and any(
            isinstance(one, nodes.Name) and one.name == self._item and _is_last_position(other)
            for one, other in (operands, operands[::-1])
        )

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """`content.split('</think>')[-1]`, whatever the tag is."""
        self.generic_visit(node)
        made = node.node
        if not (isinstance(made, nodes.Call) and isinstance(made.node, nodes.Getattr) and made.node.attr == "split"):
            return node
        return _trace_call("visible", made.node.node, node, line=node.lineno)

    def _asks_whether_after(self, node: nodes.Compare) -> bool | None:
        """True for `loop.index0 > newest` and its like, False for the opposite, None for any other comparison."""
        if node.ops[0].op not in ("gt", "gteq", "lt", "lteq"):
            return None
        left, right = node.expr, node.ops[0].expr
        greater = node.ops[0].op in ("gt", "gteq")
        if _is_position(left, self._aliases) and _variable_name(right) in self._variables:
            return greater
        if _is_position(right, self._aliases) and _variable_name(left) in self._variables:
            return not greater
        return None


def _is_position(node: nodes.Node, aliases: Iterable[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in aliases
    return _is_loop(node, _POSITIONS)


def _is_loop(node: nodes.Node, attributes: Sequence[str]) -> bool:
    return (
        isinstance(node, nodes.Getattr)
        and node.attr in attributes
        and isinstance(node.node, nodes.Name)
        and node.node.name == "loop"
    )


def _is_following_messages(node: nodes.Node) -> bool:
    """`messages[loop.index:]`: what follows."""
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Slice)
        and node.arg.stop is None
        and node.arg.start is not None
        and _is_loop(node.arg.start, ("index",))
    )


def _is_last_position(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Filter):
        return node.name == "last"
    # As it was parsed, or once its constants have been computed.
    return isinstance(node, nodes.Getitem) and node.arg in (nodes.Neg(nodes.Const(1)), nodes.Const(-1))


def _variable_name(node: nodes.Node) -> str | None:
    """The name of a variable, or of an attribute of one."""
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return f"{node.node.name}.{node.attr}"
    return None


def _load(name: str, line: int) -> nodes.Name:
    return nodes.Name(name, "load", lineno=line)


def _trace_call(name: str, *args: nodes.Expr, line: int) -> nodes.Call:
    return environment_call("trace", nodes.Const(name), *args, line=line)


def _trace_output(name: str, *args: nodes.Expr, line: int) -> nodes.Output:
    return nodes.Output([_trace_call(name, *args, line=line)], lineno=line)
