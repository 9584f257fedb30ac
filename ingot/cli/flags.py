"""A command's flags: its own, and those that stand for settings, built from the settings' own metadata."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ingot.config import FOREIGN, SETTINGS, Config, Setting, load
from ingot.errors import ConfigError, nearest
from ingot.observe.logs import set_up

KNOWN = {**SETTINGS, **FOREIGN}
SECTIONS = tuple(dict.fromkeys(known.section for known in KNOWN.values()))
LAST_SECTION = list(SETTINGS.values())[-1].section


class CommandParser(argparse.ArgumentParser):
    """argparse that knows its flags by name, so that an unknown one is answered with the nearest.

    Every mistake is a ConfigError."""

    def __init__(self, command: str, about: str) -> None:
        super().__init__(
            prog=f"ingot {command}",
            description=about,
            allow_abbrev=False,
            add_help=False,
            formatter_class=_Formatter,
        )
        self.flags: list[str] = []
        self.groups: dict[str, argparse._ArgumentGroup] = {}
        self.flag("-h", "--help", action="help", help="show this")

    def flag(self, *names: str, section: str = "options", **options: Any) -> None:
        """Add a flag under a heading. A flag that is not given leaves no trace in the namespace."""
        if section not in self.groups:
            self.groups[section] = self.add_argument_group(section)
        options.setdefault("default", argparse.SUPPRESS)
        self.groups[section].add_argument(*names, **options)
        switch = options.get("action") is argparse.BooleanOptionalAction
        self.flags += [*names, *(f"--no-{name.removeprefix('--')}" for name in names if switch)]

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        namespace, rest = self.parse_known_args(arguments)
        if rest:
            self.error(self._unknown(rest))
        return namespace

    def _unknown(self, rest: list[str]) -> str:
        name = next((word for word in rest if word.startswith("-")), rest[0]).partition("=")[0]
        if not name.startswith("-"):
            return f"unexpected argument {name!r}"
        if (known := SETTINGS.get(name[2:].replace("-", "_"))) and known.positional:
            return f"unknown flag {name}; give it without a flag: {self.prog} {known.positional}"
        near = nearest(name, self.flags)
        return f"unknown flag {name}; " + (f"did you mean {near}?" if near else f"see {self.prog} --help")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(100, _columns()))


def _columns() -> int:
    import shutil

    return max(60, shutil.get_terminal_size().columns - 2)


def add_settings(parser: CommandParser, sections: Iterable[str] = SECTIONS, leave_out: Collection[str] = ()) -> None:
    """One flag a setting, in the settings' order and sections, plus `--config`. What other servers call them comes
    last."""
    wanted = set(sections)
    for known in KNOWN.values():
        if known.section in wanted and known.name not in leave_out and known.positional is None:
            parser.flag(known.flag, *known.also, section=known.section, **_options(known))
    parser.flag(
        "--config",
        section=LAST_SECTION,
        metavar="FILE",
        type=Path,
        help="a TOML file with settings (default: ~/.config/ingot/config.toml, if it is there)",
    )


def _options(known: Setting) -> dict[str, Any]:
    default = "" if known.default in (None, (), False) or known.secret else f" (default: {known.default})"
    options: dict[str, Any] = {"dest": known.name, "help": (known.help + default).replace("%", "%%")}
    if known.kind is bool:
        action = "store_true" if known.name in FOREIGN else argparse.BooleanOptionalAction
        return options | {"action": action}
    if known.kind is tuple:
        options["action"] = "append"
    return options | {"metavar": _metavar(known)}


def _metavar(known: Setting) -> str:
    names: dict[Any, str] = {int: "N", float: "X", Path: "PATH", tuple: "A,B", dict: "JSON", str: known.name.upper()}
    return names[known.kind]


def settle(namespace: argparse.Namespace) -> Config:
    """The configuration from the given flags, the environment and the file; sets up logging by it."""
    given = {
        # A list may be given at once, with commas, or one by one.
        name: ",".join(value) if isinstance(value, list) else value
        for name, value in vars(namespace).items()
        if name in KNOWN and value is not None
    }
    config = load(given, os.environ, vars(namespace).get("config"))
    set_up(config.settings.log_level, config.settings.log_format)
    return config
