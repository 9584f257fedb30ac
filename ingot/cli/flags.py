"""Flags of commands: their own, and those of settings, which are made from the settings' metadata."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from ingot.config import FOREIGN_SETTINGS, SETTINGS, Config, Setting, load_config
from ingot.config.sources import ALL_SETTINGS
from ingot.errors import ConfigError, nearest_name
from ingot.observe.logs import set_up_logging

SETTING_SECTIONS = tuple(dict.fromkeys(option.section for option in ALL_SETTINGS.values()))
LAST_SECTION = list(SETTINGS.values())[-1].section
FIRST_SECTION: Final = "what matters first"
MODEL_FILE_SETTINGS: Final = ("model", "models_dir", "offline")
"""Settings of where models are, for commands that run none."""
LOCAL_SECTIONS: Final = ("the model", "the engine", "recording and tracing")
"""Settings of how to run a model: useless where a running server is asked."""
DEFAULT_URL: Final = "http://127.0.0.1:8000"
"""The server that commands use unless another is named."""
LARGEST_FLAG_VALUE: Final = 1 << 20


class CommandParser(argparse.ArgumentParser):
    """argparse that suggests the nearest flag for an unknown one. Every mistake is a ConfigError."""

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
        """Add a flag to a section. A flag that is not used is not in the namespace."""
        if section not in self.groups:
            self.groups[section] = self.add_argument_group(section)
        options.setdefault("default", argparse.SUPPRESS)
        self.groups[section].add_argument(*names, **options)
        switch = options.get("action") is argparse.BooleanOptionalAction
        self.flags += [*names, *(f"--no-{name.removeprefix('--')}" for name in names if switch)]

    def format_help(self) -> str:
        """With a usage of one line: all flags are listed below it."""
        words = [
            {None: "{}", "?": "[{}]", "*": "[{} ...]", "+": "{} [{} ...]"}[
                action.nargs if isinstance(action.nargs, str) else None
            ].replace("{}", str(action.metavar or action.dest))
            for action in self._actions
            if not action.option_strings
        ]
        self.usage = " ".join([self.prog, *words, "[FLAGS]"])
        return super().format_help()

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        namespace, unknown = self.parse_known_args(arguments)
        if unknown:
            self.error(self._unknown(unknown))
        return namespace

    def _unknown(self, unknown: list[str]) -> str:
        name = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
        if not name.startswith("-"):
            return f"unexpected argument {name!r}"
        if (option := SETTINGS.get(name[2:].replace("-", "_"))) and option.positional:
            return f"unknown flag {name}; give it without a flag: {self.prog} {option.positional}"
        near = nearest_name(name, self.flags)
        return f"unknown flag {name}; " + (f"did you mean {near}?" if near else f"see {self.prog} --help")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        columns = max(60, shutil.get_terminal_size().columns - 2)
        super().__init__(prog, max_help_position=32, width=min(100, columns))


def choose_action(command: str, actions: Mapping[str, str], arguments: Sequence[str]) -> str | None:
    """The action that `ingot COMMAND ACTION ...` names; None if its usage was asked for and printed. Raises ConfigError
    for an unknown one."""
    if not arguments or arguments[0] in ("-h", "--help"):
        rows = "\n".join(f"  {name:<10} {about}" for name, about in actions.items())
        print(
            f"usage: ingot {command} ACTION [FLAGS]\n\n{rows}\n\n"
            f"`ingot {command} ACTION --help` lists an action's flags."
        )
        return None
    action = arguments[0]
    if action not in actions:
        near = nearest_name(action, actions)
        hint = f"did you mean {near}?" if near else f"actions: {', '.join(actions)}"
        raise ConfigError(f"unknown action {action}; {hint}")
    return action


def add_settings(
    parser: CommandParser,
    sections: Iterable[str] = SETTING_SECTIONS,
    leave_out: Collection[str] = (),
    *,
    names: Collection[str] = (),
    first: Sequence[str] = (),
) -> None:
    """A flag for each setting of these sections or names, in the settings' order and sections, and `--config`. Those
    named in `first` come first, in a section of their own. Other servers' names come last."""
    wanted = set(sections)
    chosen = [
        option
        for option in ALL_SETTINGS.values()
        if (option.section in wanted or option.name in names)
        and option.name not in leave_out
        and option.positional is None
    ]
    for option in sorted(chosen, key=lambda option: first.index(option.name) if option.name in first else len(first)):
        section = FIRST_SECTION if option.name in first else option.section
        parser.flag(option.flag, *option.also, section=section, **_flag_options(option))
    parser.flag(
        "--config",
        section=LAST_SECTION,
        metavar="FILE",
        type=Path,
        help="a TOML file with settings (default: ~/.config/ingot/config.toml, if it exists)",
    )


def _flag_options(option: Setting) -> dict[str, Any]:
    default = "" if option.default in (None, (), False) or option.secret else f" (default: {option.default})"
    options: dict[str, Any] = {"dest": option.name, "help": (option.help + default).replace("%", "%%")}
    if option.kind is bool:
        action = "store_true" if option.name in FOREIGN_SETTINGS else argparse.BooleanOptionalAction
        return options | {"action": action}
    if option.kind is tuple:
        options["action"] = "append"
    metavars = {int: "N", float: "X", Path: "PATH", tuple: "A,B", dict: "JSON"}
    return options | {"metavar": metavars.get(option.kind, option.name.upper())}


def settings_from_arguments(namespace: argparse.Namespace) -> Config:
    """The configuration from flags, environment and file. Sets up logging with it."""
    flags = {
        # A list may be one flag with commas, or several flags.
        name: ",".join(value) if isinstance(value, list) else value
        for name, value in vars(namespace).items()
        if name in ALL_SETTINGS and value is not None
    }
    config = load_config(flags, os.environ, vars(namespace).get("config"))
    set_up_logging(config.settings.log_level, config.settings.log_format)
    return config


def number_flag(flags: Mapping[str, Any], name: str, usual: int, low: int, high: int = LARGEST_FLAG_VALUE) -> int:
    """The number that the flag of that name has, or `usual` without it. Raises ConfigError."""
    flag = "--" + name.replace("_", "-")
    return parse_whole_number(flag, flags[name], low, high) if name in flags else usual


def parse_whole_number(flag: str, text: str | int, low: int, high: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not a whole number") from None
    if not low <= value <= high:
        raise ConfigError(f"{flag}: {value} is not between {low} and {high}")
    return value


def timeout_flag(flags: Mapping[str, Any]) -> float:
    return float(number_flag(flags, "timeout", 600, low=1))


def require_parent_folder(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
