"""What one rendering of a template may cost, and the account of what it has cost so far.

Two rules make any template end soon. No value ever exists that weighs more than `Limits.value` with everything in it
written out, so that a single operation on values takes a bounded time. And every operation is a step that is counted
against `Limits.steps` and looks at the clock, so that many of them do too.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import Undefined

from ingot.text.cancellation import checkpoint

_MIB = 1 << 20
_SCALARS = (str, int, float, bool, type(None), Undefined, range)
ITEM = 32  # what an item of a container weighs, in characters: about its memory
_CLOCK_EVERY = 1 << 16
_LARGEST_BITS = 4096
_MOST_COMPARISONS = 1 << 30


class Exhausted(TemplateRuntimeError):
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


class Meter:
    """The account of one rendering. Once a limit is passed, every further operation fails."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._steps = 0
        self._made = 0
        self._deadline = time.monotonic() + limits.seconds

    def step(self) -> None:
        self._steps += 1
        if self._steps > self._limits.steps:
            raise Exhausted(f"it takes more than {self._limits.steps} steps")
        self._look_at_clock()

    def _look_at_clock(self) -> None:
        checkpoint()
        if time.monotonic() > self._deadline:
            raise Exhausted(f"it takes longer than {self._limits.seconds:g} seconds")

    def room(self, size: int) -> None:
        """Refuse a value of this size before it is made."""
        if size > self._limits.value:
            raise Exhausted(f"it builds a value of more than {self._limits.value} characters")

    def compare(self, left: int, right: int) -> None:
        """Refuse work that takes as many comparisons as the product of two lengths."""
        if left * right > _MOST_COMPARISONS:
            raise Exhausted(f"it takes more than {_MOST_COMPARISONS} comparisons in one search")

    def charge(self, size: int) -> None:
        self._made += size
        if self._made > self._limits.made:
            raise Exhausted(f"it builds more than {self._limits.made} characters in all")

    def admit(self, value: Any) -> Any:
        """`value`, new and of a lawful weight, with its making paid for."""
        if isinstance(value, str):
            self.room(len(value))
            self.charge(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.room(self._weight(value))
            self.charge(ITEM * len(value))
        elif isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
            raise Exhausted(f"it builds a number of more than {_LARGEST_BITS} bits")
        return value

    def items(self, values: Iterable[Any]) -> list[Any]:
        """All of `values`, which may be computed as they are taken."""
        taken = []
        for value in values:
            self.step()
            taken.append(value)
            self.room(ITEM * len(taken))
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
            raise Exhausted(f"it builds a number of more than {_LARGEST_BITS} bits")

    def percent_format(self, pattern: str, arguments: Any) -> None:
        """Refuse `pattern % arguments` where a width or a repeated argument would make it huge."""
        widest = 0
        for key, width, precision in _percent_fields(pattern):
            if "(" in key or "*" in (width, precision):
                raise Exhausted("it uses a format that cannot be bounded")
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
                total += ITEM * len(item)
                self.room(total)
                rest.extend(item)
            elif isinstance(item, dict):
                total += 2 * ITEM * len(item)
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


current: ContextVar[Meter] = ContextVar("meter")
