"""What a rendering tells of itself: where in the text each message stands, and which turns keep their thinking.

Both are written into the parsed template. A loop whose item is one of the messages notes where each begins, so that
nothing has to be guessed from the text. And the two ways in which templates leave out the thinking of earlier turns
may be made to depend on the message alone, so that what was rendered once is rendered the same in every later turn:
asking whether a message comes after the newest question, and splitting its content where the thinking ends. Nor does a
loop look through what follows a message to decide what is shown of it. What a template would show with the newest
question, as some do with tools, is then shown with the first.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from ingot.text.template.sandbox import Sandbox

# `official`: as the template says. `stable`: a message is rendered the same whatever follows it.
TemplateHistory = Literal["stable", "official"]

_POSITIONS = ("index", "index0")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_MARK = re.compile("\ue000([0-9a-f]{16}):(-|[0-9]+)\ue001")
"""Of any witness: an expression for each one's own would have to be compiled for each prompt."""


@dataclass(frozen=True, slots=True)
class TextRun:
    """A run of the text: the template's own, or that of the message at this place in the list."""

    message: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt's text in pieces. The last one, which follows all messages, is what opens the answer."""

    pieces: tuple[TextRun, ...]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class Thought(str):
    """An assistant's content with its thinking in front, of which a template is not to cut anything off."""

    __slots__ = ()


class Witness:
    """Of one rendering. Knows the messages by identity, as templates hand the very same objects from list to list."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], history: TemplateHistory) -> None:
        self._messages = messages  # kept, so that no other object can take over an identity
        self._places = {id(message): place for place, message in enumerate(messages)}
        self._history = history
        self._nonce = secrets.token_hex(8)
        self._loop: int | None = None  # the loop whose items are being rendered

    def begin(self, item: Any, loop: int) -> str:
        place = self._places.get(id(item))
        if place is None or self._loop not in (None, loop):
            return ""
        self._loop = loop
        return self._mark(str(place))

    def over(self, loop: int) -> str:
        if self._loop != loop:
            return ""
        self._loop = None
        return self._mark("-")

    def recent(self, official: Any, after: bool, item: Any) -> Any:
        if self._history == "official" or id(item) not in self._places or item.get("role") != "assistant":
            return official
        return after == has_reasoning(item)

    def newest(self, official: Any, item: Any) -> Any:
        if self._history == "official" or id(item) not in self._places or item.get("role") != "user":
            return official
        return item is next(message for message in self._messages if message.get("role") == "user")

    def visible(self, content: Any, official: Any) -> Any:
        return content if isinstance(content, Thought) else official

    def following(self, official: Any, item: Any) -> Any:
        looks_ahead = self._history == "stable" and id(item) in self._places and item.get("role") == "assistant"
        return () if looks_ahead else official

    def read(self, marked: str) -> Rendered:
        """The pieces of a text with the marks in it."""
        pieces: list[TextRun] = []
        place, begin = None, 0
        for mark in _MARK.finditer(marked):
            if mark[1] != self._nonce:
                continue  # a message wrote it
            pieces.append(TextRun(place, marked[begin : mark.start()]))
            place, begin = None if mark[2] == "-" else int(mark[2]), mark.end()
        pieces.append(TextRun(place, marked[begin:]))
        return Rendered(tuple(pieces))

    def _mark(self, name: str) -> str:
        return f"\ue000{self._nonce}:{name}\ue001"


current: ContextVar[Witness] = ContextVar("witness")


def has_reasoning(message: Mapping[str, Any]) -> bool:
    """Whether an assistant's message tells what it thought, in a key of its own or at the front of its content."""
    if any(isinstance(message.get(key), str) and message[key].strip() for key in _REASONING_KEYS):
        return True
    content = message.get("content")
    return isinstance(content, str) and "</think>" in content


class WitnessedSandbox(Sandbox):
    """A sandbox in which templates have been given a witness. Whoever renders sets `current` first."""

    def begin(self, item: Any, loop: int) -> str:
        return current.get().begin(item, loop)

    def over(self, loop: int) -> str:
        return current.get().over(loop)

    def recent(self, official: Any, after: bool, item: Any) -> Any:
        return current.get().recent(official, after, item)

    def newest(self, official: Any, item: Any) -> Any:
        return current.get().newest(official, item)

    def visible(self, content: Any, official: Any) -> Any:
        return current.get().visible(content, official)

    def following(self, official: Any, item: Any) -> Any:
        return current.get().following(official, item)


def witnessed(tree: nodes.Template) -> nodes.Template:
    """The parsed template, with a witness in its loops. Changes the tree it is given."""
    return _Placing(tree).visit(tree)


class _Placing(NodeTransformer):
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
        later = node.iter
        if outer is not None and isinstance(later, nodes.Getitem) and _is_rest(later) and not node.find(nodes.Output):
            node.iter = _call("following", later, nodes.Name(outer, "load", lineno=node.lineno), line=node.lineno)
        if item is None:
            return node
        self._loops += 1
        loop = nodes.Const(self._loops)
        node.body.insert(0, _printed("begin", nodes.Name(item, "load", lineno=node.lineno), loop, line=node.lineno))
        return [node, _printed("over", loop, line=node.lineno)]

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if self._item is None or len(node.ops) != 1:
            return node
        item = nodes.Name(self._item, "load", lineno=node.lineno)
        if (after := self._asks_whether_after(node)) is not None:
            return _call("recent", node, nodes.Const(after), item, line=node.lineno)
        if self._asks_whether_newest(node):
            return _call("newest", node, item, line=node.lineno)
        return node

    def visit_And(self, node: nodes.And) -> nodes.Node:
        """`loop.last and system_message is defined`: what the system said goes into the newest question."""
        self.generic_visit(node)
        set_here = isinstance(node.right, nodes.Test) and _variable(node.right.node) in self._variables
        if self._item is not None and set_here and _is_loop(node.left, ("last",)):
            node.left = _call("newest", node.left, nodes.Name(self._item, "load", lineno=node.lineno), line=node.lineno)
        return node

    def _asks_whether_newest(self, node: nodes.Compare) -> bool:
        """`message == user_messages[-1]`: what stands there goes with the newest question."""
        sides = (node.expr, node.ops[0].expr)
        return node.ops[0].op == "eq" and any(
            isinstance(one, nodes.Name) and one.name == self._item and _is_last(other)
            for one, other in (sides, sides[::-1])
        )

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """`content.split('</think>')[-1]`, whatever the tag is."""
        self.generic_visit(node)
        made = node.node
        if not (isinstance(made, nodes.Call) and isinstance(made.node, nodes.Getattr) and made.node.attr == "split"):
            return node
        return _call("visible", made.node.node, node, line=node.lineno)

    def _asks_whether_after(self, node: nodes.Compare) -> bool | None:
        """True for `loop.index0 > newest` and its like, False for the opposite, None for any other comparison."""
        if node.ops[0].op not in ("gt", "gteq", "lt", "lteq"):
            return None
        left, right = node.expr, node.ops[0].expr
        greater = node.ops[0].op in ("gt", "gteq")
        if _is_position(left, self._aliases) and _variable(right) in self._variables:
            return greater
        if _is_position(right, self._aliases) and _variable(left) in self._variables:
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


def _is_rest(node: nodes.Getitem) -> bool:
    """`messages[loop.index:]`: what follows."""
    return (
        isinstance(node.arg, nodes.Slice)
        and node.arg.stop is None
        and node.arg.start is not None
        and _is_loop(node.arg.start, ("index",))
    )


def _is_last(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Filter):
        return node.name == "last"
    # As it was parsed, or once its constants have been computed.
    return isinstance(node, nodes.Getitem) and node.arg in (nodes.Neg(nodes.Const(1)), nodes.Const(-1))


def _variable(node: nodes.Node) -> str | None:
    """The name of a variable, or of an attribute of one."""
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return f"{node.node.name}.{node.attr}"
    return None


def _call(name: str, *args: nodes.Expr, line: int) -> nodes.Call:
    method = nodes.EnvironmentAttribute(name, lineno=line)
    return nodes.Call(method, list(args), [], None, None, lineno=line)


def _printed(name: str, *args: nodes.Expr, line: int) -> nodes.Output:
    return nodes.Output([_call(name, *args, line=line)], lineno=line)
