"""A field of `Settings` as flags, variables and files see it, and what its values must be."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ingot.errors import ConfigError, nearest_name

VARIABLE_PREFIX = "INGOT_"
"""Begins the variables that hold settings."""

VALUE_KINDS_IN_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple: "a list of texts",
    dict: "a JSON object",
    Path: "a path",
}


def setting(default: Any, help: str, **metadata: Any) -> Any:
    """A field of `Settings`. Metadata: section (kept by the fields that follow), positional (the argument
    in place of a flag), low, high, choices, secret, check (value -> problem or None), also (what other servers call
    the flag)."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    kind: Any  # str, int, float, bool, Path, tuple or dict
    optional: bool
    default: Any
    help: str
    section: str
    positional: str | None
    low: float | None
    high: float | None
    choices: tuple[str, ...] | None
    secret: bool
    check: Callable[[Any], str | None] | None
    also: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return VARIABLE_PREFIX + self.name.upper()

    def from_toml(self, value: Any, place: str) -> Any:
        """A value of a TOML file as the setting has it."""
        if self.kind is float and type(value) is int:
            return float(value)
        if self.kind is tuple and isinstance(value, list):
            return tuple(value)
        if self.kind is Path and isinstance(value, str) and value:
            path = Path(value).expanduser()
            if not path.is_absolute():
                raise ConfigError(f"{place}: a path in the file must be absolute or start with ~")
            return path
        return value

    def checked(self, value: Any, place: str) -> Any:
        """`value` within the type and the limits, paths with their ~ expanded; else ConfigError, naming `place`."""
        if value is None and self.optional:
            return None
        problem = _type_problem(self, value) or _limit_problem(self, value)
        if problem is None and self.check is not None:
            problem = self.check(value)
        if problem is not None:
            raise ConfigError(f"{place}: {problem}")
        return value.expanduser() if isinstance(value, Path) else value


@dataclass(frozen=True, slots=True)
class GivenSetting:
    """What a source says of a setting: where that came from, and what to call the place in an error."""

    known: Setting
    value: Any
    origin: str
    place: str

    def checked(self) -> Any:
        return self.known.checked(self.value, self.place)


def settings_of(table: type) -> Iterator[Setting]:
    """The fields of a dataclass that were made by `setting`."""
    hints = typing.get_type_hints(table)
    section = ""
    for each in fields(table):
        meta = each.metadata
        section = meta.get("section", section)
        kind, optional = _value_kind(hints[each.name])
        limits = {name: meta.get(name) for name in ("positional", "low", "high", "choices", "check")}
        secret = meta.get("secret", False)
        also = meta.get("also", ())
        yield Setting(
            each.name, kind, optional, each.default, meta["help"], section, secret=secret, also=also, **limits
        )


def _value_kind(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) is types.UnionType:
        plain = [arm for arm in typing.get_args(hint) if arm is not types.NoneType]
        return typing.get_origin(plain[0]) or plain[0], True
    return typing.get_origin(hint) or hint, False


def _type_problem(known: Setting, value: Any) -> str | None:
    number = known.kind is float and type(value) is int
    if not (isinstance(value, known.kind) or number) or (isinstance(value, bool) and known.kind is not bool):
        shown = "this" if known.secret else repr(value)
        return f"{shown} is not {VALUE_KINDS_IN_WORDS[known.kind]}"
    if known.kind is tuple and not all(isinstance(part, str) and part for part in value):
        return f"{value!r} is not a list of texts"
    return "must not be empty" if value == "" else None


def _limit_problem(known: Setting, value: Any) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a finite number"
    if known.low is not None and value < known.low:
        return f"{value} is too small; the least is {known.low}"
    if known.high is not None and value > known.high:
        return f"{value} is too large; the most is {known.high}"
    if known.choices is not None and value not in known.choices:
        near = nearest_name(value, known.choices)
        return f"{value!r} is not one of {', '.join(known.choices)}" + (f"; did you mean {near}?" if near else "")
    return None
