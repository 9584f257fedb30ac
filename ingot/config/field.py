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
"""Environment variables of settings begin with it."""

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
    """A field of `Settings`. Metadata: section (of this field and those that follow), positional (the argument
    instead of a flag), low, high, choices, switch (true and false are its choices `on` and `off`), secret, check
    (value -> problem or None)."""
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
    switch: bool
    secret: bool
    check: Callable[[Any], str | None] | None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return VARIABLE_PREFIX + self.name.upper()

    def from_toml(self, value: Any, label: str) -> Any:
        """The setting's value for one of a TOML file. Errors name it by `label`."""
        if self.kind is float and type(value) is int:
            return float(value)
        if self.kind is tuple and isinstance(value, list):
            return tuple(value)
        if self.kind is Path and isinstance(value, str) and value:
            path = Path(value).expanduser()
            if not path.is_absolute():
                raise ConfigError(f"{label}: a path in the file must be absolute or start with ~")
            return path
        return value

    def validate(self, value: Any, label: str) -> Any:
        """`value`, with ~ expanded in paths. Raises ConfigError, naming `label`, if type or limits forbid it."""
        if self.optional and (value is None or (value == "auto" and self.choices and "auto" not in self.choices)):
            return None  # other servers' word for what is the default here
        if self.switch and isinstance(value, bool):
            return "on" if value else "off"
        problem = _type_problem(self, value) or _limit_problem(self, value)
        if problem is None and self.check is not None:
            problem = self.check(value)
        if problem is not None:
            raise ConfigError(f"{label}: {problem}")
        return value.expanduser() if isinstance(value, Path) else value


def settings_of(table: type) -> Iterator[Setting]:
    """The fields of a dataclass that were made by `setting`."""
    hints = typing.get_type_hints(table)
    section = ""
    for each in fields(table):
        meta = each.metadata
        section = meta.get("section", section)
        kind, optional = _value_kind(hints[each.name])
        limits = {name: meta.get(name) for name in ("positional", "low", "high", "choices", "check")}
        switch, secret = meta.get("switch", False), meta.get("secret", False)
        yield Setting(
            each.name, kind, optional, each.default, meta["help"], section, switch=switch, secret=secret, **limits
        )


def _value_kind(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) is types.UnionType:
        plain = [arm for arm in typing.get_args(hint) if arm is not types.NoneType]
        return typing.get_origin(plain[0]) or plain[0], True
    return typing.get_origin(hint) or hint, False


def _type_problem(option: Setting, value: Any) -> str | None:
    number = option.kind is float and type(value) is int
    if not (isinstance(value, option.kind) or number) or (isinstance(value, bool) and option.kind is not bool):
        shown = "this" if option.secret else repr(value)
        return f"{shown} is not {VALUE_KINDS_IN_WORDS[option.kind]}"
    if option.kind is tuple and not all(isinstance(part, str) and part for part in value):
        return f"{value!r} is not a list of texts"
    return "must not be empty" if value == "" else None


def _limit_problem(option: Setting, value: Any) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a finite number"
    if option.low is not None and value < option.low:
        return f"{value} is too small; the minimum is {option.low}"
    if option.high is not None and value > option.high:
        return f"{value} is too large; the maximum is {option.high}"
    if option.choices is not None and value not in option.choices:
        near = nearest_name(value, option.choices)
        return f"{value!r} is not one of {', '.join(option.choices)}" + (f"; did you mean {near}?" if near else "")
    return None
