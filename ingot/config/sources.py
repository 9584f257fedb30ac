"""Where settings come from: flags, then variables, then a TOML file, then the defaults."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.config.field import PREFIX, Given, Setting
from ingot.config.foreign import FOREIGN, in_our_words
from ingot.config.settings import SETTINGS, Settings
from ingot.errors import ConfigError, nearest

OTHER_VARIABLES = frozenset(
    {
        *("INGOT_AS", "INGOT_CONFIG", "INGOT_KERNELS", "INGOT_THREADS", "INGOT_ISA"),
        *("INGOT_CONTROL", "INGOT_WATCH", "INGOT_GROUP_TOKEN", "INGOT_LISTEN", "INGOT_RESTARTS"),
    }
)
"""Variables with our prefix that are no settings: the file's place, the choice of kernels for one process, where a
process stands among several that run one model, and when it was started again."""
KNOWN: Mapping[str, Setting] = {**SETTINGS, **FOREIGN}
WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


@dataclass(frozen=True, slots=True)
class Config:
    """The settings, the file that was read, and where each value came from: `default`, `file PATH`,
    `env INGOT_X`, `flag --x` or `argument X`."""

    settings: Settings
    origins: Mapping[str, str]
    file: Path | None


def load(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None) -> Config:
    """Settle every value. `flags` holds only what was given, by field name; `file` is what `--config` named.

    Raises ConfigError, naming the flag, variable or key at fault and the nearest known one.
    """
    path = _file_path(environ, file)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(SETTINGS, "default")
    for source in (_from_file(path), _from_variables(environ), _from_flags(flags)):  # the weakest first
        for given in in_our_words(source):
            values[given.known.name] = given.checked()
            origins[given.known.name] = given.origin
    return Config(Settings(**values), origins, path)


def _from_file(path: Path | None) -> Iterable[Given]:
    for name, raw in _read(path).items() if path is not None else ():
        known, place = _known(name, f"{path}: unknown key", KNOWN), f"{path}: {name}"
        yield Given(known, known.from_toml(raw, place), f"file {path}", place)


def _from_variables(environ: Mapping[str, str]) -> Iterable[Given]:
    variables = {known.variable: known for known in KNOWN.values()}
    for name, raw in environ.items():
        if name.startswith(PREFIX) and name not in OTHER_VARIABLES:
            known = _known(name, "unknown variable", variables, OTHER_VARIABLES)
            yield Given(known, _from_text(known, raw, name), f"env {name}", name)


def _from_flags(flags: Mapping[str, Any]) -> Iterable[Given]:
    for name, raw in flags.items():
        known = _known(name, "unknown flag", KNOWN)
        origin = f"argument {known.positional}" if known.positional else f"flag {known.flag}"
        place = known.positional or known.flag
        yield Given(known, _from_text(known, raw, place) if isinstance(raw, str) else raw, origin, place)


def _known(name: str, what: str, table: Mapping[str, Setting], also: frozenset[str] = frozenset()) -> Setting:
    if name in table:
        return table[name]
    near = nearest(name, [*table, *also])
    raise ConfigError(f"{what} {name}" + (f"; did you mean {near}?" if near else ""))


def _file_path(environ: Mapping[str, str], given: Path | None) -> Path | None:
    if given is not None:
        return given.expanduser()
    if named := environ.get("INGOT_CONFIG"):
        return Path(named).expanduser()
    usual = Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "ingot" / "config.toml"
    return usual if usual.is_file() else None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # broken TOML or broken UTF-8
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _from_text(known: Setting, text: str, place: str) -> Any:
    """A value from a flag or a variable. Empty means none where that is possible and no secret."""
    if text == "" and known.optional and not known.secret:
        return None
    if known.kind is bool:
        if text.strip().lower() not in WORDS:
            raise ConfigError(f"{place}: {text!r} is neither true nor false")
        return WORDS[text.strip().lower()]
    if known.kind in (int, float):
        try:
            return known.kind(text)
        except ValueError:
            wanted = "whole number" if known.kind is int else "number"
            raise ConfigError(f"{place}: {text!r} is not a {wanted}") from None
    if known.kind is tuple:
        return tuple(part for piece in text.split(",") if (part := piece.strip()))
    if known.kind is dict:
        return _object(text, place)
    return Path(text) if known.kind is Path and text else text


def _object(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{place}: {text[:100]!r} is not valid JSON") from None
