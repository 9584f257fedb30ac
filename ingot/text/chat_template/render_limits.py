"""Filters, functions, string methods and operators of chat templates, each bounded before it works.

Jinja's own implementations serve wherever their result is no larger than a small multiple of what goes in. The few
that can make much out of little are bounded here; those that no chat template needs are left out.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, cast

from jinja2.exceptions import TemplateError
from jinja2.filters import FILTERS as JINJA
from jinja2.filters import make_attrgetter
from jinja2.sandbox import SandboxedEnvironment
from jinja2.tests import TESTS as JINJA_TESTS
from jinja2.utils import pass_environment
from markupsafe import Markup

from ingot.text.template.meter import ITEM, Exhausted, Meter, current

_MOST_COLUMNS = 10_000
_WIDEST_INDENT = 16
_FINEST_PRECISION = 15
_LONGEST_ESCAPE = 6  # a character that Markup escapes becomes at most this many
_WHITE_SPACE = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)


class Refusal(TemplateError):
    """The template itself refuses these messages, in its own words."""


def metered(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as one step, its result weighed. What Jinja reads from its attributes stays with it."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        meter = current.get()
        meter.step()
        return meter.admit(function(*args, **kwargs))

    return run


def _raise_exception(message: Any) -> None:
    raise Refusal(str(message))


def _strftime_now(pattern: str) -> str:
    # A number in a directive is a width to some C libraries, with which one directive could fill the memory.
    if re.search(r"%[^a-zA-Z%]*\d", pattern):
        raise Exhausted("it formats the time with a width")
    current.get().room(_MOST_COLUMNS * pattern.count("%"))
    return datetime.now().strftime(pattern)


def _dict(pairs: Any = (), **kwargs: Any) -> dict[Any, Any]:
    # One at a time, each a step, because keys can be chosen such that every new one is slower to place.
    made: dict[Any, Any] = {}
    for key, value in pairs.items() if isinstance(pairs, dict) else pairs:
        current.get().step()
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
    meter = current.get()
    width = len(indent) if isinstance(indent, str) else indent or 0
    if max(width, len("".join(separators or ()))) > _WIDEST_INDENT:
        raise Exhausted(f"it indents JSON by more than {_WIDEST_INDENT} characters")
    meter.nested(value, width)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_environment
def _join(environment: SandboxedEnvironment, values: Any, d: Any = "", attribute: Any = None) -> str:
    meter = current.get()
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    texts = [meter.text(value) for value in meter.items(values)]
    return _joined(meter, meter.text(d), texts)


def _joined(meter: Meter, between: str, texts: list[str]) -> str:
    meter.room(sum(map(len, texts)) + len(between) * len(texts))
    return between.join(texts)


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    meter = current.get()
    text, old, new = meter.text(value), meter.text(old), meter.text(new)
    limit = -1 if count is None else count
    _bound_replace(meter, text, (old, new, limit))
    return text.replace(old, new, limit)


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = current.get().text(value)
    size = width if isinstance(width, int) else len(width)
    current.get().room(len(text) + size * (text.count("\n") + 2))
    return JINJA["indent"](text, width, first, blank)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    current.get().percent_format(current.get().text(value), kwargs or args)
    return JINJA["format"](value, *args, **kwargs)


def _center(value: Any, width: int = 80) -> str:
    current.get().room(width)
    return current.get().text(value).center(width)


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    if abs(precision) > _FINEST_PRECISION:
        raise Exhausted(f"it rounds to more than {_FINEST_PRECISION} digits")
    return JINJA["round"](value, precision, method)


def _title(value: Any) -> str:
    text = current.get().text(value)
    current.get().room(ITEM * len(text))  # which it takes apart, at worst, into single characters
    return JINJA["title"](text)


def _trim(value: Any, chars: str | None = None) -> str:
    text = current.get().text(value)
    _bound_comparisons(current.get(), text, (chars,))
    return text.strip(chars)


def _columns(name: str) -> Callable[..., Any]:
    def run(value: Any, number: int, fill_with: Any = None) -> Any:
        if number > _MOST_COLUMNS:
            raise Exhausted(f"it uses {name!r} with more than {_MOST_COLUMNS} columns")
        return JINJA[name](current.get().items(value), number, fill_with)

    return run


@pass_environment
def _sum(environment: SandboxedEnvironment, values: Any, attribute: Any = None, start: Any = 0) -> Any:
    meter = current.get()
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    for value in values:
        meter.step()
        bound_add(meter, start, value)
        start = meter.admit(start + value)
    return start


def _list(values: Any) -> list[Any]:
    return current.get().items(values)


def _string(value: Any) -> str:
    return value if isinstance(value, str) else current.get().text(value)


def _safe(value: Any) -> Markup:
    return Markup(current.get().text(value))


_LEFT_OUT = ("pprint", "striptags", "urlencode", "urlize", "wordcount", "wordwrap")
UNBOUNDED_METHODS = frozenset({"encode", "from_bytes", "fromkeys", "maketrans", "striptags", "to_bytes", "translate"})
"""Of Python's types. Without the first two, no template ever holds bytes."""

_BOUNDED = (_center, _format, _indent, _join, _list, _replace, _round, _safe, _string, _sum, _title, _tojson, _trim)
FILTERS: Mapping[str, Callable[..., Any]] = {
    **{name: metered(function) for name, function in JINJA.items() if name not in _LEFT_OUT},
    **{name: metered(_columns(name)) for name in ("batch", "slice")},
    **{function.__name__.removeprefix("_"): metered(function) for function in _BOUNDED},
}

TESTS: Mapping[str, Callable[..., Any]] = {
    name: metered(cast(Callable[..., Any], test)) for name, test in JINJA_TESTS.items()
}

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "dict": _dict,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}


def _size(value: Any) -> int:
    if isinstance(value, Markup):
        return _LONGEST_ESCAPE * len(value)
    return ITEM * len(value) if isinstance(value, (list, tuple)) else len(value)


def bound_add(meter: Meter, left: Any, right: Any) -> None:
    if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
        escaped = _LONGEST_ESCAPE if isinstance(left, Markup) or isinstance(right, Markup) else 1
        meter.room(escaped * (_size(left) + _size(right)))


def _bound_multiply(meter: Meter, left: Any, right: Any) -> None:
    if isinstance(right, (str, list, tuple)):
        left, right = right, left
    if isinstance(left, (str, list, tuple)) and isinstance(right, int):
        meter.room(_size(left) * right)


def _bound_power(meter: Meter, left: Any, right: Any) -> None:
    meter.power(left, right)


def _bound_modulo(meter: Meter, left: Any, right: Any) -> None:
    if isinstance(left, str):
        meter.percent_format(left, right)


OPERATORS: Mapping[str, Callable[[Meter, Any, Any], None]] = {
    "+": bound_add,
    "*": _bound_multiply,
    "**": _bound_power,
    "%": _bound_modulo,
}


def _bound_replace(meter: Meter, text: str, args: tuple[Any, ...]) -> None:
    if len(args) < 2 or not isinstance(args[0], str) or not isinstance(args[1], str):
        return  # the call itself will say what is wrong
    old, new, limit = (*args, -1)[:3]
    found = text.count(old)
    times = found if limit < 0 else min(found, limit)
    meter.room(len(text) + times * len(new) * (_LONGEST_ESCAPE if isinstance(text, Markup) else 1))


def _bound_pad(meter: Meter, text: str, args: tuple[Any, ...]) -> None:
    if args and isinstance(args[0], int):
        meter.room(args[0])


def _bound_tabs(meter: Meter, text: str, args: tuple[Any, ...]) -> None:
    if args and isinstance(args[0], int):
        meter.room(len(text) + text.count("\t") * args[0])


def _bound_split(meter: Meter, text: str, args: tuple[Any, ...]) -> None:
    if args and isinstance(args[0], str):
        pieces = text.count(args[0])
    else:  # at any white space, which includes every end of a line
        pieces = sum(map(text.count, _WHITE_SPACE))
    meter.room(ITEM * (pieces + 1))


def _bound_comparisons(meter: Meter, text: str, args: tuple[Any, ...]) -> None:
    if args and isinstance(args[0], str):
        meter.compare(len(text), len(args[0]))


def _bound_backward_split(meter: Meter, text: str, args: tuple[Any, ...]) -> None:
    # Python searches forwards in linear time, but backwards it compares anew at every place.
    _bound_comparisons(meter, text, args)
    _bound_split(meter, text, args)


_METHODS: Mapping[str, Callable[[Meter, str, tuple[Any, ...]], None]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _bound_pad),
    **dict.fromkeys(("split", "splitlines"), _bound_split),
    **dict.fromkeys(("lstrip", "rfind", "rindex", "rpartition", "rstrip", "strip"), _bound_comparisons),
    "expandtabs": _bound_tabs,
    "rsplit": _bound_backward_split,
    "replace": _bound_replace,
}


def bound_string_method(text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments to call the method with, once it is certain that its result will not be too large."""
    meter = current.get()
    if name == "join" and args and isinstance(args[0], Iterable):
        items = meter.items(args[0])
        escaped = _LONGEST_ESCAPE if isinstance(text, Markup) else 1
        meter.room(escaped * (sum(len(item) for item in items if isinstance(item, str)) + len(text) * len(items)))
        return (items, *args[1:])
    if name in _METHODS:
        named = (kwargs[key] for key in ("sep", "tabsize") if key in kwargs)
        _METHODS[name](meter, text, args or tuple(named))
    return args
