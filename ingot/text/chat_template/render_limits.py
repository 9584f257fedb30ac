"""What one rendering of a chat template may cost, and how that is enforced.

Two rules make any template end soon. No value ever exists that weighs more than `RenderLimits.value` with everything in
it written out, so that a single operation on values takes a bounded time. And every operation is a step that counts
against `RenderLimits.steps` and checks the clock.

Jinja's own filters, functions and methods are used wherever their result is no larger than a small multiple of their
input. The few that can make much out of little are bounded here; those that no chat template needs are left out.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from types import GeneratorType
from typing import Any, cast

from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError
from jinja2.filters import FILTERS as JINJA
from jinja2.filters import make_attrgetter
from jinja2.runtime import Undefined
from jinja2.sandbox import SandboxedEnvironment
from jinja2.tests import TESTS as JINJA_TESTS
from jinja2.utils import pass_environment

from ingot.text.cancellation import checkpoint

_MIB = 1 << 20
_SCALARS = (str, int, float, bool, type(None), Undefined, range)
ITEM_WEIGHT = 32  # what an item of a container weighs, in characters: about its memory
_CLOCK_EVERY = 1 << 16
_LARGEST_BITS = 4096
_MOST_COMPARISONS = 1 << 30
_PERCENT_FIELD = r"%(?:\(([^)]*)\))?[#0 +-]*(\*|\d+)?(?:\.(\*|\d+))?"


class RenderLimitExceeded(TemplateRuntimeError):
    """The template exceeded its limits."""


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Sizes are in characters; an item of a list counts as 32."""

    source: int = _MIB // 8  # of the template's own text
    output: int = 32 * _MIB  # of the rendered text
    value: int = 32 * _MIB  # of one value, written out
    made: int = 256 * _MIB  # of all values together
    steps: int = 4_000_000
    seconds: float = 5.0


class RenderBudget:
    """The account of one rendering. Once a limit is passed, every further operation fails."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._steps = 0
        self._made = 0
        self._deadline = time.monotonic() + limits.seconds

    def step(self) -> None:
        self._steps += 1
        if self._steps > self._limits.steps:
            raise RenderLimitExceeded(f"it takes more than {self._limits.steps} steps")
        self._check_clock()

    def _check_clock(self) -> None:
        checkpoint()
        if time.monotonic() > self._deadline:
            raise RenderLimitExceeded(f"it takes longer than {self._limits.seconds:g} seconds")

    def room(self, size: int) -> None:
        """Refuse a value of this size before it is made."""
        if size > self._limits.value:
            raise RenderLimitExceeded(f"it builds a value of more than {self._limits.value} characters")

    def compare(self, left: int, right: int) -> None:
        """Refuse work that takes as many comparisons as the product of two lengths."""
        if left * right > _MOST_COMPARISONS:
            raise RenderLimitExceeded(f"it takes more than {_MOST_COMPARISONS} comparisons in one search")

    def charge(self, size: int) -> None:
        self._made += size
        if self._made > self._limits.made:
            raise RenderLimitExceeded(f"it builds more than {self._limits.made} characters in all")

    def admit(self, value: Any) -> Any:
        """`value`, new and of a lawful weight, with its making paid for."""
        if isinstance(value, str):
            self.room(len(value))
            self.charge(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.room(self._weight(value))
            self.charge(ITEM_WEIGHT * len(value))
        elif isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
            raise RenderLimitExceeded(f"it builds a number of more than {_LARGEST_BITS} bits")
        return value

    def stepped(self, values: Iterable[Any]) -> Iterator[Any]:
        """`values`, each charged as a step and as an item of a list."""
        for value in values:
            self.step()
            self.charge(ITEM_WEIGHT)
            yield value

    def text(self, value: Any) -> str:
        """`value` as the template would print it."""
        if isinstance(value, str):
            return str(value)
        self.room(self._weight(value, printable=True))
        return str(value)

    def nested(self, value: Any, width: int) -> None:
        """Refuse `value` where writing each item on a line, indented by `width` for each level, would be too much."""
        total, pending = 0, [(value, 1)]
        while pending:
            item, depth = pending.pop()
            if isinstance(item, (list, tuple, dict)):
                total += len(item) * depth * width
                self.room(total)
                pending.extend((inner, depth + 1) for inner in (item.values() if isinstance(item, dict) else item))

    def power(self, base: Any, exponent: Any) -> None:
        if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _LARGEST_BITS:
            raise RenderLimitExceeded(f"it builds a number of more than {_LARGEST_BITS} bits")

    def percent_format(self, pattern: str, arguments: Any) -> None:
        """Refuse `pattern % arguments` where a width or a repeated argument would make it huge."""
        widest = 0
        # Key, width and precision of each field. A key with a parenthesis in it comes back with that parenthesis.
        for key, width, precision in re.findall(_PERCENT_FIELD, pattern):
            if "(" in key or "*" in (width, precision):
                raise RenderLimitExceeded("it uses a format that cannot be bounded")
            widest = max(widest, int(width or 0), int(precision or 0))
        if isinstance(arguments, dict):
            arguments = tuple(arguments.values())
        for item in arguments if isinstance(arguments, tuple) else (arguments,):
            widest = max(widest, len(self.text(item)))
        self.room(len(pattern) + pattern.count("%") * widest)

    def _weight(self, value: Any, *, printable: bool = False) -> int:
        """The size of `value` written out, shared parts counted each time; stops once that is unlawful."""
        total, seen, pending = 0, 0, [value]
        while pending:
            item = pending.pop()
            seen += 1
            if seen % _CLOCK_EVERY == 0:
                self._check_clock()
            if isinstance(item, str):
                total += len(item)
            elif isinstance(item, (list, tuple)):
                total += ITEM_WEIGHT * len(item)
                self.room(total)
                pending.extend(item)
            elif isinstance(item, dict):
                total += 2 * ITEM_WEIGHT * len(item)
                self.room(total)
                pending.extend(item.keys())
                pending.extend(item.values())
            elif printable and not isinstance(item, _SCALARS):
                raise TemplateRuntimeError(f"a value of type {type(item).__name__!r} has no text")
            self.room(total)
        return total


current_budget: ContextVar[RenderBudget] = ContextVar("budget")


_MOST_COLUMNS = 10_000
_WIDEST_INDENT = 16
_WHITE_SPACE = "".join(chr(code) for code in range(0x3001) if chr(code).isspace())


class TemplateRefusal(TemplateError):
    """The template itself refuses these messages, in its own words."""


def _raise_exception(message: Any) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(pattern: str) -> str:
    # A number in a directive is a width to some C libraries, with which one directive could fill the memory.
    if re.search(r"%[^a-zA-Z%]*\d", pattern):
        raise RenderLimitExceeded("it formats the time with a width")
    current_budget.get().room(_MOST_COLUMNS * pattern.count("%"))
    return datetime.now().strftime(pattern)


def _dict(pairs: Any = (), **kwargs: Any) -> dict[Any, Any]:
    # One at a time, each a step, because keys can be chosen such that every new one is slower to insert.
    made: dict[Any, Any] = {}
    for key, value in pairs.items() if isinstance(pairs, dict) else pairs:
        current_budget.get().step()
        made[key] = value
    return made | kwargs


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates expect it: nothing escaped for HTML, non-ASCII text as it is."""
    width = len(indent) if isinstance(indent, str) else indent or 0
    if max(width, len("".join(separators or ()))) > _WIDEST_INDENT:
        raise RenderLimitExceeded(f"it indents JSON by more than {_WIDEST_INDENT} characters")
    current_budget.get().nested(value, width)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_environment
def _join(environment: SandboxedEnvironment, values: Any, d: Any = "", attribute: Any = None) -> str:
    budget = current_budget.get()
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    texts, between = [budget.text(value) for value in budget.stepped(values)], budget.text(d)
    _bound_join(budget, between, texts)
    return between.join(texts)


@pass_environment
def _sum(environment: SandboxedEnvironment, values: Any, attribute: Any = None, start: Any = 0) -> Any:
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    return functools.reduce(functools.partial(environment.call_binop, cast(Any, None), "+"), values, start)


def _bound_multiply(budget: RenderBudget, left: Any, right: Any) -> None:
    if isinstance(right, (str, list, tuple)):
        left, right = right, left
    if isinstance(left, (str, list, tuple)) and isinstance(right, int):
        budget.room(len(left) * right * (1 if isinstance(left, str) else ITEM_WEIGHT))


def _bound_modulo(budget: RenderBudget, left: Any, right: Any) -> None:
    if isinstance(left, str):
        budget.percent_format(left, right)


OPERATORS: Mapping[str, Callable[[RenderBudget, Any, Any], None]] = {
    "*": _bound_multiply,
    "**": RenderBudget.power,
    "%": _bound_modulo,
}


def _bound_columns(budget: RenderBudget, value: Any, *args: Any, **named: Any) -> None:
    if any(isinstance(number, int) and abs(number) > _MOST_COLUMNS for number in (*args, *named.values())):
        raise RenderLimitExceeded(f"it asks a filter for more than {_MOST_COLUMNS} columns or digits")
    _bound_letters(budget, value)


def _bound_format(budget: RenderBudget, text: str, *args: Any, **named: Any) -> None:
    budget.percent_format(text, named or args)


def _bound_letters(budget: RenderBudget, value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, str):
        budget.room(ITEM_WEIGHT * len(value))  # which is split, at worst, into single characters


def _bound_join(budget: RenderBudget, text: str, values: Any = (), *_: Any) -> None:
    budget.room(sum(len(value) for value in values if isinstance(value, str)) + len(text) * len(values))


def _bound_padding(budget: RenderBudget, text: str, *args: Any, **named: Any) -> None:
    """Of the whole text, of its lines or of its tabs."""
    widths = (len(width) if isinstance(width, str) else width for width in (*args, *named.values()))
    size = max((width for width in widths if isinstance(width, int)), default=0)
    budget.room(len(text) + size * (1 + text.count("\n") + text.count("\t")))


def _bound_replace(budget: RenderBudget, text: str, old: Any = "", new: Any = "", count: int | None = None) -> None:
    found, size = text.count(budget.text(old)), len(budget.text(new))
    budget.room(len(text) + size * (found if count is None or count < 0 else min(found, count)))


def _bound_search(budget: RenderBudget, text: str, *args: Any, **named: Any) -> None:
    # Python searches forwards in linear time, but backwards it compares anew at every offset.
    for sought in (*args, *named.values()):
        if isinstance(sought, str):
            budget.compare(len(text), len(sought))


def _bound_split(budget: RenderBudget, text: str, *args: Any, **named: Any) -> None:
    sought = [sep for sep in (*args, *named.values()) if isinstance(sep, str)]
    # Where nothing is named it is split at any white space, which includes every end of a line.
    budget.room(ITEM_WEIGHT * (1 + sum(map(text.count, sought[:1] or _WHITE_SPACE))))
    _bound_search(budget, text, *sought)


_BOUNDS: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(("center", "expandtabs", "indent", "ljust", "rjust", "zfill"), _bound_padding),
    **dict.fromkeys(("lstrip", "rfind", "rindex", "rpartition", "rstrip", "strip", "trim"), _bound_search),
    **dict.fromkeys(("rsplit", "split", "splitlines"), _bound_split),
    "replace": _bound_replace,
}
_METHOD_BOUNDS: Mapping[str, Callable[..., None]] = {**_BOUNDS, "join": _bound_join}
_FILTER_BOUNDS: Mapping[str, Callable[..., None]] = {**_BOUNDS, "format": _bound_format, "title": _bound_letters}
"""Of filters that turn any value into text."""
_VALUE_BOUNDS: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(("batch", "round", "slice"), _bound_columns),
    **dict.fromkeys(("list", "sort"), _bound_letters),
}
_LEFT_OUT = ("pprint", "striptags", "urlencode", "urlize", "wordcount", "wordwrap")
UNBOUNDED_METHODS = frozenset({"encode", "from_bytes", "fromkeys", "maketrans", "striptags", "to_bytes", "translate"})
"""Of Python's types. Without the first two, no template ever holds bytes."""


def bound_method(
    budget: RenderBudget, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The arguments to call a method of a value with, once it is certain that its result will not be too large."""
    name, text = method.__name__, method.__self__
    if name in UNBOUNDED_METHODS:
        raise SecurityError(f"it calls {name!r}")
    if isinstance(text, str) and name in _METHOD_BOUNDS:
        args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)
        named = {key: value for key, value in kwargs.items() if not key.startswith("_")}  # which are Jinja's
        _METHOD_BOUNDS[name](budget, text, *args, **named)
    return args


def _budgeted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as one step, its result weighed. What Jinja reads from its attributes stays with it."""
    own = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        budget = current_budget.get()
        budget.step()
        if name in _VALUE_BOUNDS:
            _VALUE_BOUNDS[name](budget, *args[own:], **kwargs)
        elif name in _FILTER_BOUNDS:
            _FILTER_BOUNDS[name](budget, budget.text(args[own]), *args[own + 1 :], **kwargs)
        made = function(*args, **kwargs)
        return budget.stepped(made) if isinstance(made, GeneratorType) else budget.admit(made)

    return run


_OURS = {"join": _join, "sum": _sum, "tojson": _tojson}
FILTERS: Mapping[str, Callable[..., Any]] = {
    name: _budgeted(name, function) for name, function in {**JINJA, **_OURS}.items() if name not in _LEFT_OUT
}
TESTS: Mapping[str, Callable[..., Any]] = {
    name: _budgeted("", cast(Callable[..., Any], test)) for name, test in JINJA_TESTS.items()
}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "dict": _dict,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}
