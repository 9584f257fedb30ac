"""What one rendering of a chat template may cost, and what keeps to it.

Two rules make any template end soon. No value ever exists that weighs more than `RenderLimits.value` with everything in
it written out, so that a single operation on values takes a bounded time. And every operation is a step that is counted
against `RenderLimits.steps` and looks at the clock, so that many of them do too.

Jinja's own filters, functions and methods serve wherever their result is no larger than a small multiple of what goes
in. The few that can make much out of little are bounded here; those that no chat template needs are left out.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from jinja2.exceptions import TemplateError, TemplateRuntimeError
from jinja2.filters import FILTERS as JINJA
from jinja2.filters import make_attrgetter
from jinja2.runtime import Undefined
from jinja2.sandbox import SandboxedEnvironment
from jinja2.tests import TESTS as JINJA_TESTS
from jinja2.utils import pass_environment
from markupsafe import Markup

from ingot.text.cancellation import checkpoint

_MIB = 1 << 20
_SCALARS = (str, int, float, bool, type(None), Undefined, range)
ITEM_WEIGHT = 32  # what an item of a container weighs, in characters: about its memory
_CLOCK_EVERY = 1 << 16
_LARGEST_BITS = 4096
_MOST_COMPARISONS = 1 << 30


class RenderLimitExceeded(TemplateRuntimeError):
    """The template asked for more than its limits allow."""


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Sizes are in characters; an item of a list counts as 32."""

    source: int = _MIB // 8  # of the template's own text
    output: int = 32 * _MIB  # of the rendered text
    value: int = 32 * _MIB  # of one value, written out
    made: int = 256 * _MIB  # of all values together
    steps: int = 4_000_000
    seconds: float = 5.0


class RenderMeter:
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
        self._look_at_clock()

    def _look_at_clock(self) -> None:
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

    def items(self, values: Iterable[Any]) -> list[Any]:
        """All of `values`, which may be computed as they are taken."""
        taken = []
        for value in values:
            self.step()
            taken.append(value)
            self.room(ITEM_WEIGHT * len(taken))
        return self.admit(taken)

    def text(self, value: Any) -> str:
        """`value` as the template would print it."""
        if isinstance(value, str):
            return str(value)
        self.room(self._weight(value, printable=True))
        return str(value)

    def nested(self, value: Any, width: int) -> None:
        """Refuse `value` where writing each item on a line, indented by `width` for each level, would be too much."""
        total, rest = 0, [(value, 1)]
        while rest:
            item, depth = rest.pop()
            if isinstance(item, (list, tuple, dict)):
                total += len(item) * depth * width
                self.room(total)
                rest.extend((inner, depth + 1) for inner in (item.values() if isinstance(item, dict) else item))

    def power(self, base: Any, exponent: Any) -> None:
        if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _LARGEST_BITS:
            raise RenderLimitExceeded(f"it builds a number of more than {_LARGEST_BITS} bits")

    def percent_format(self, pattern: str, arguments: Any) -> None:
        """Refuse `pattern % arguments` where a width or a repeated argument would make it huge."""
        widest = 0
        for key, width, precision in _percent_fields(pattern):
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
        total, seen, rest = 0, 0, [value]
        while rest:
            item = rest.pop()
            seen += 1
            if seen % _CLOCK_EVERY == 0:
                self._look_at_clock()
            if isinstance(item, str):
                total += len(item)
            elif isinstance(item, (list, tuple)):
                total += ITEM_WEIGHT * len(item)
                self.room(total)
                rest.extend(item)
            elif isinstance(item, dict):
                total += 2 * ITEM_WEIGHT * len(item)
                self.room(total)
                rest.extend(item.keys())
                rest.extend(item.values())
            elif printable and not isinstance(item, _SCALARS):
                raise TemplateRuntimeError(f"a value of type {type(item).__name__!r} has no text")
            self.room(total)
        return total


def _percent_fields(pattern: str) -> list[tuple[str, str, str]]:
    """Key, width and precision of each field. A key with a parenthesis in it comes back with that parenthesis."""
    return re.findall(r"%(?:\(([^)]*)\))?[#0 +-]*(\*|\d+)?(?:\.(\*|\d+))?", pattern)


current_meter: ContextVar[RenderMeter] = ContextVar("meter")


_MOST_COLUMNS = 10_000
_WIDEST_INDENT = 16
_FINEST_PRECISION = 15
_LONGEST_ESCAPE = 6  # a character that Markup escapes becomes at most this many
_WHITE_SPACE = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)


class TemplateRefusal(TemplateError):
    """The template itself refuses these messages, in its own words."""


def metered_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as one step, its result weighed. What Jinja reads from its attributes stays with it."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        meter = current_meter.get()
        meter.step()
        return meter.admit(function(*args, **kwargs))

    return run


def _raise_exception(message: Any) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(pattern: str) -> str:
    # A number in a directive is a width to some C libraries, with which one directive could fill the memory.
    if re.search(r"%[^a-zA-Z%]*\d", pattern):
        raise RenderLimitExceeded("it formats the time with a width")
    current_meter.get().room(_MOST_COLUMNS * pattern.count("%"))
    return datetime.now().strftime(pattern)


def _dict(pairs: Any = (), **kwargs: Any) -> dict[Any, Any]:
    # One at a time, each a step, because keys can be chosen such that every new one is slower to place.
    made: dict[Any, Any] = {}
    for key, value in pairs.items() if isinstance(pairs, dict) else pairs:
        current_meter.get().step()
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
    meter = current_meter.get()
    width = len(indent) if isinstance(indent, str) else indent or 0
    if max(width, len("".join(separators or ()))) > _WIDEST_INDENT:
        raise RenderLimitExceeded(f"it indents JSON by more than {_WIDEST_INDENT} characters")
    meter.nested(value, width)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_environment
def _join(environment: SandboxedEnvironment, values: Any, d: Any = "", attribute: Any = None) -> str:
    meter = current_meter.get()
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    texts = [meter.text(value) for value in meter.items(values)]
    return _join_texts(meter, meter.text(d), texts)


def _join_texts(meter: RenderMeter, between: str, texts: list[str]) -> str:
    meter.room(sum(map(len, texts)) + len(between) * len(texts))
    return between.join(texts)


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    meter = current_meter.get()
    text, old, new = meter.text(value), meter.text(old), meter.text(new)
    limit = -1 if count is None else count
    _bound_replace(meter, text, (old, new, limit))
    return text.replace(old, new, limit)


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = current_meter.get().text(value)
    size = width if isinstance(width, int) else len(width)
    current_meter.get().room(len(text) + size * (text.count("\n") + 2))
    return JINJA["indent"](text, width, first, blank)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    current_meter.get().percent_format(current_meter.get().text(value), kwargs or args)
    return JINJA["format"](value, *args, **kwargs)


def _center(value: Any, width: int = 80) -> str:
    current_meter.get().room(width)
    return current_meter.get().text(value).center(width)


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    if abs(precision) > _FINEST_PRECISION:
        raise RenderLimitExceeded(f"it rounds to more than {_FINEST_PRECISION} digits")
    return JINJA["round"](value, precision, method)


def _title(value: Any) -> str:
    text = current_meter.get().text(value)
    current_meter.get().room(ITEM_WEIGHT * len(text))  # which it takes apart, at worst, into single characters
    return JINJA["title"](text)


def _trim(value: Any, chars: str | None = None) -> str:
    text = current_meter.get().text(value)
    _bound_comparisons(current_meter.get(), text, (chars,))
    return text.strip(chars)


def _columns(name: str) -> Callable[..., Any]:
    def run(value: Any, number: int, fill_with: Any = None) -> Any:
        if number > _MOST_COLUMNS:
            raise RenderLimitExceeded(f"it uses {name!r} with more than {_MOST_COLUMNS} columns")
        return JINJA[name](current_meter.get().items(value), number, fill_with)

    return run


@pass_environment
def _sum(environment: SandboxedEnvironment, values: Any, attribute: Any = None, start: Any = 0) -> Any:
    meter = current_meter.get()
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    for value in values:
        meter.step()
        bound_add(meter, start, value)
        start = meter.admit(start + value)
    return start


def _list(values: Any) -> list[Any]:
    return current_meter.get().items(values)


def _string(value: Any) -> str:
    return value if isinstance(value, str) else current_meter.get().text(value)


def _safe(value: Any) -> Markup:
    return Markup(current_meter.get().text(value))


_LEFT_OUT = ("pprint", "striptags", "urlencode", "urlize", "wordcount", "wordwrap")
UNBOUNDED_METHODS = frozenset({"encode", "from_bytes", "fromkeys", "maketrans", "striptags", "to_bytes", "translate"})
"""Of Python's types. Without the first two, no template ever holds bytes."""

_BOUNDED = (_center, _format, _indent, _join, _list, _replace, _round, _safe, _string, _sum, _title, _tojson, _trim)
FILTERS: Mapping[str, Callable[..., Any]] = {
    **{name: metered_function(function) for name, function in JINJA.items() if name not in _LEFT_OUT},
    **{name: metered_function(_columns(name)) for name in ("batch", "slice")},
    **{function.__name__.removeprefix("_"): metered_function(function) for function in _BOUNDED},
}

TESTS: Mapping[str, Callable[..., Any]] = {
    name: metered_function(cast(Callable[..., Any], test)) for name, test in JINJA_TESTS.items()
}

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "dict": _dict,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}


def _value_size(value: Any) -> int:
    if isinstance(value, Markup):
        return _LONGEST_ESCAPE * len(value)
    return ITEM_WEIGHT * len(value) if isinstance(value, (list, tuple)) else len(value)


def bound_add(meter: RenderMeter, left: Any, right: Any) -> None:
    if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
        escaped = _LONGEST_ESCAPE if isinstance(left, Markup) or isinstance(right, Markup) else 1
        meter.room(escaped * (_value_size(left) + _value_size(right)))


def _bound_multiply(meter: RenderMeter, left: Any, right: Any) -> None:
    if isinstance(right, (str, list, tuple)):
        left, right = right, left
    if isinstance(left, (str, list, tuple)) and isinstance(right, int):
        meter.room(_value_size(left) * right)


def _bound_power(meter: RenderMeter, left: Any, right: Any) -> None:
    meter.power(left, right)


def _bound_modulo(meter: RenderMeter, left: Any, right: Any) -> None:
    if isinstance(left, str):
        meter.percent_format(left, right)


OPERATORS: Mapping[str, Callable[[RenderMeter, Any, Any], None]] = {
    "+": bound_add,
    "*": _bound_multiply,
    "**": _bound_power,
    "%": _bound_modulo,
}


def _bound_replace(meter: RenderMeter, text: str, args: tuple[Any, ...]) -> None:
    if len(args) < 2 or not isinstance(args[0], str) or not isinstance(args[1], str):
        return  # the call itself will say what is wrong
    old, new, limit = (*args, -1)[:3]
    found = text.count(old)
    times = found if limit < 0 else min(found, limit)
    meter.room(len(text) + times * len(new) * (_LONGEST_ESCAPE if isinstance(text, Markup) else 1))


def _bound_pad(meter: RenderMeter, text: str, args: tuple[Any, ...]) -> None:
    if args and isinstance(args[0], int):
        meter.room(args[0])


def _bound_tabs(meter: RenderMeter, text: str, args: tuple[Any, ...]) -> None:
    if args and isinstance(args[0], int):
        meter.room(len(text) + text.count("\t") * args[0])


def _bound_split(meter: RenderMeter, text: str, args: tuple[Any, ...]) -> None:
    if args and isinstance(args[0], str):
        pieces = text.count(args[0])
    else:  # at any white space, which includes every end of a line
        pieces = sum(map(text.count, _WHITE_SPACE))
    meter.room(ITEM_WEIGHT * (pieces + 1))


def _bound_comparisons(meter: RenderMeter, text: str, args: tuple[Any, ...]) -> None:
    if args and isinstance(args[0], str):
        meter.compare(len(text), len(args[0]))


def _bound_backward_split(meter: RenderMeter, text: str, args: tuple[Any, ...]) -> None:
    # Python searches forwards in linear time, but backwards it compares anew at every place.
    _bound_comparisons(meter, text, args)
    _bound_split(meter, text, args)


_METHODS: Mapping[str, Callable[[RenderMeter, str, tuple[Any, ...]], None]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _bound_pad),
    **dict.fromkeys(("split", "splitlines"), _bound_split),
    **dict.fromkeys(("lstrip", "rfind", "rindex", "rpartition", "rstrip", "strip"), _bound_comparisons),
    "expandtabs": _bound_tabs,
    "rsplit": _bound_backward_split,
    "replace": _bound_replace,
}


def bound_string_method(text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments to call the method with, once it is certain that its result will not be too large."""
    meter = current_meter.get()
    if name == "join" and args and isinstance(args[0], Iterable):
        items = meter.items(args[0])
        escaped = _LONGEST_ESCAPE if isinstance(text, Markup) else 1
        meter.room(escaped * (sum(len(item) for item in items if isinstance(item, str)) + len(text) * len(items)))
        return (items, *args[1:])
    if name in _METHODS:
        named = (kwargs[key] for key in ("sep", "tabsize") if key in kwargs)
        _METHODS[name](meter, text, args or tuple(named))
    return args
