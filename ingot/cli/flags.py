"""A command's flags: its own, and those that stand for settings, built from the settings' own metadata. Numbers that
benchmarks' flags hold are read and bounded here."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from ingot.config import FOREIGN_SETTINGS, SETTINGS, Config, Setting, load_config
from ingot.errors import ConfigError, nearest_name
from ingot.observe.logs import set_up_logging

KNOWN_SETTINGS = {**SETTINGS, **FOREIGN_SETTINGS}
SETTING_SECTIONS = tuple(dict.fromkeys(known.section for known in KNOWN_SETTINGS.values()))
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
            formatter_class=_HelpFormatter,
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
        near = nearest_name(name, self.flags)
        return f"unknown flag {name}; " + (f"did you mean {near}?" if near else f"see {self.prog} --help")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(100, _terminal_columns()))


def _terminal_columns() -> int:
    import shutil

    return max(60, shutil.get_terminal_size().columns - 2)


def add_settings(
    parser: CommandParser, sections: Iterable[str] = SETTING_SECTIONS, leave_out: Collection[str] = ()
) -> None:
    """One flag a setting, in the settings' order and sections, plus `--config`. What other servers call them comes
    last."""
    wanted = set(sections)
    for known in KNOWN_SETTINGS.values():
        if known.section in wanted and known.name not in leave_out and known.positional is None:
            parser.flag(known.flag, *known.also, section=known.section, **_flag_options(known))
    parser.flag(
        "--config",
        section=LAST_SECTION,
        metavar="FILE",
        type=Path,
        help="a TOML file with settings (default: ~/.config/ingot/config.toml, if it is there)",
    )


def _flag_options(known: Setting) -> dict[str, Any]:
    default = "" if known.default in (None, (), False) or known.secret else f" (default: {known.default})"
    options: dict[str, Any] = {"dest": known.name, "help": (known.help + default).replace("%", "%%")}
    if known.kind is bool:
        action = "store_true" if known.name in FOREIGN_SETTINGS else argparse.BooleanOptionalAction
        return options | {"action": action}
    if known.kind is tuple:
        options["action"] = "append"
    return options | {"metavar": _flag_metavar(known)}


def _flag_metavar(known: Setting) -> str:
    names: dict[Any, str] = {int: "N", float: "X", Path: "PATH", tuple: "A,B", dict: "JSON", str: known.name.upper()}
    return names[known.kind]


def settings_from_arguments(namespace: argparse.Namespace) -> Config:
    """The configuration from the given flags, the environment and the file; sets up logging by it."""
    given = {
        # A list may be given at once, with commas, or one by one.
        name: ",".join(value) if isinstance(value, list) else value
        for name, value in vars(namespace).items()
        if name in KNOWN_SETTINGS and value is not None
    }
    config = load_config(given, os.environ, vars(namespace).get("config"))
    set_up_logging(config.settings.log_level, config.settings.log_format)
    return config


DEFAULT_URL: Final = "http://127.0.0.1:8000"
"""The server that is measured where none is named."""
LARGEST_FLAG_VALUE: Final = 1 << 20  # of anything that is counted here


def number_flag(given: Mapping[str, Any], name: str, usual: int, low: int, high: int = LARGEST_FLAG_VALUE) -> int:
    """The flag of that name, or what is usual where it was not given. Raises ConfigError."""
    flag = "--" + name.replace("_", "-")
    return parse_whole_number(flag, given[name], low, high) if name in given else usual


def parse_whole_number(flag: str, text: str | int, low: int, high: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not a whole number") from None
    if not low <= value <= high:
        raise ConfigError(f"{flag}: {value} is not between {low} and {high}")
    return value


def timeout_flag(given: Mapping[str, Any]) -> float:
    return float(number_flag(given, "timeout", 600, low=1))


def require_parent_folder(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
