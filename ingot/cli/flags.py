"""Flags of commands: their own, and those of settings, which are made from the settings' metadata."""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from ingot.config import SETTINGS, Config, Setting, load_config
from ingot.config.foreign import ForeignName, find_foreign, nearest_known, put_as_ours
from ingot.config.sources import BOOLEAN_WORDS
from ingot.errors import ConfigError, nearest_name
from ingot.observe.logs import set_up_logging

SETTING_SECTIONS = tuple(dict.fromkeys(option.section for option in SETTINGS.values()))
LAST_SECTION = list(SETTINGS.values())[-1].section
FIRST_SECTION: Final = "what matters first"
MODEL_FILE_SETTINGS: Final = ("model", "models_dir", "offline")
"""Settings of where models are, for commands that run none."""
LOCAL_SECTIONS: Final = ("the model", "the engine", "recording and tracing")
"""Settings of how to run a model: useless where a running server is asked."""
DEFAULT_URL: Final = "http://127.0.0.1:8000"
"""The server that commands use unless another is named."""
LARGEST_FLAG_VALUE: Final = 1 << 20

log = logging.getLogger("ingot.cli")


class CommandParser(argparse.ArgumentParser):
    """argparse that suggests the nearest flag for an unknown one, and that takes flags of other servers where it has
    the settings that they stand for. Every mistake is a ConfigError."""

    def __init__(self, command: str, about: str) -> None:
        super().__init__(
            prog=f"ingot {command}",
            description=about,
            allow_abbrev=False,
            add_help=False,
            formatter_class=_HelpFormatter,
        )
        self.flags: list[str] = []
        self.settings: set[str] = set()
        self.switches: dict[str, tuple[str, ...]] = {}  # flags that may have a word, and which
        self.groups: dict[str, argparse._ArgumentGroup] = {}
        self.flag("-h", "--help", action="help", help="show this")

    def flag(self, *names: str, section: str = "options", **options: Any) -> None:
        """Add a flag to a section. A flag that is not used is not in the namespace."""
        if section not in self.groups:
            self.groups[section] = self.add_argument_group(section)
        options.setdefault("default", argparse.SUPPRESS)
        self.groups[section].add_argument(*names, **options)
        switch = options.get("action") is argparse.BooleanOptionalAction or any(name in self.switches for name in names)
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
        own, foreign = self._without_foreign(arguments) if self.settings else (list(arguments), {})
        namespace, unknown = self.parse_known_args(self._with_switch_words(own))
        if unknown:
            self.error(self._unknown(unknown))
        for name in [name for name, (known, _) in foreign.items() if known.row.to == "model"]:
            self._set_model(namespace, *foreign.pop(name))
        vars(namespace).update({name: value for name, (_, value) in foreign.items()})
        return namespace

    def _with_switch_words(self, arguments: Sequence[str]) -> list[str]:
        """The word of a switch as part of its flag, so that MODEL is not taken for one: `--flag` is `--flag=on`."""
        words, found = list(arguments), list[str]()
        while words and words[0] != "--":
            word = words.pop(0)
            if word in self.switches:
                known = words and words[0].lower() in (*self.switches[word], *BOOLEAN_WORDS)
                word = f"{word}={words.pop(0).lower() if known else 'on'}"
            elif (negated := "--" + word.removeprefix("--no-")) != word and negated in self.switches:
                word = f"{negated}=off"
            found.append(word)
        return found + words

    def _put_as_ours(self, known: ForeignName, text: str | None) -> dict[str, Any]:
        try:
            return put_as_ours(known, text)
        except ConfigError as error:
            self.error(f"{known.name}: {error.message}")

    def _set_model(self, namespace: argparse.Namespace, known: ForeignName, text: str | None) -> None:
        """MODEL by a flag of other servers."""
        model = self._put_as_ours(known, text)["model"]
        if getattr(namespace, "model", None) not in (None, model):
            self.error(f"{known.name} and MODEL say different things: give one of them")
        namespace.model = model

    def _without_foreign(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, tuple[ForeignName, str | None]]]:
        """The arguments that are ours, and the values of other servers' flags, as they were written."""
        own: list[str] = []
        foreign: dict[str, tuple[ForeignName, str | None]] = {}
        words = list(arguments)
        while words and words[0] != "--":
            word = words.pop(0)
            name, equals, value = word.partition("=")
            if name.startswith("--"):  # vLLM takes --max_model_len, too
                name = name.replace("_", "-")
            known = None if name in self.flags or not re.match(r"--?[a-zA-Z]", name) else find_foreign(name)
            if known is None:
                own.append(name + equals + value)
                continue
            self._refuse_useless(known)
            if known.row.does == "refused":
                self._put_as_ours(known, value if equals else None)
                continue
            values = [value] if equals else _take_values(known, words)
            if values == [] and known.takes_value:
                self.error(f"{name}: expected a value")
            if known.row.takes == "many" and name in foreign:
                values.insert(0, foreign[name][1] or "")
            foreign[name] = known, ",".join(values) if values else None
        return own + words, foreign

    def _refuse_useless(self, known: ForeignName) -> None:
        """A flag that stands for a setting which this command does not have."""
        wanted = known.row.to or "max_sequences"
        positional = any(action.dest == wanted and not action.option_strings for action in self._actions)
        if wanted not in self.settings or (SETTINGS[wanted].positional and not positional):
            what = f" ({SETTINGS[wanted].flag} here)" if known.row.to and not SETTINGS[wanted].positional else ""
            self.error(f"{known.name}{what} is for a command that runs a model, such as `ingot serve`")

    def _unknown(self, unknown: list[str]) -> str:
        name = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
        if not name.startswith("-"):
            return f"unexpected argument {name!r}"
        near = nearest_known(name, self.flags) if self.settings else nearest_name(name, self.flags)
        return f"unknown flag {name}; " + (f"did you mean {near}?" if near else f"see {self.prog} --help")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _take_values(known: ForeignName, words: list[str]) -> list[str]:
    """The words behind a flag that are its values, taken from `words`."""
    values: list[str] = []
    optional = known.row.takes == "optional" and not known.negated
    while words and (known.takes_value or optional) and (known.row.takes == "many" or not values):
        if re.match(r"--?[a-zA-Z]", words[0]) or words[0] == "--" or (optional and not known.may_have(words[0])):
            break
        values.append(words.pop(0))
    return values


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
    *,
    names: Collection[str] = (),
    first: Sequence[str] = (),
) -> None:
    """A flag for each setting of these sections or names, in the settings' order and sections, and `--config`. Those
    named in `first` come first, in a section of their own. A command's own flag of the same name takes precedence."""
    wanted = set(sections)
    chosen = [option for option in SETTINGS.values() if option.section in wanted or option.name in names]
    for option in sorted(chosen, key=lambda option: first.index(option.name) if option.name in first else len(first)):
        parser.settings.add(option.name)
        if option.positional is None and option.flag not in parser.flags:
            section = FIRST_SECTION if option.name in first else option.section
            if option.switch:
                parser.switches[option.flag] = option.choices or ()
            parser.flag(option.flag, section=section, **_flag_options(option))
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
        return options | {"action": argparse.BooleanOptionalAction}
    if option.switch:
        return options | {"nargs": "?", "metavar": "|".join(option.choices or ())}
    if option.kind is tuple:
        options["action"] = "append"
    metavars = {int: "N", float: "X", Path: "PATH", tuple: "A,B", dict: "JSON"}
    return options | {"metavar": metavars.get(option.kind, option.name.upper())}


def settings_from_arguments(namespace: argparse.Namespace, *, ambient: bool = False) -> Config:
    """The configuration from flags, environment and file; with `ambient`, from other servers' variables, too. Sets up
    logging with it, and logs what is noted of other servers' names."""
    flags = {
        # A list may be one flag with commas, or several flags.
        name: ",".join(value) if isinstance(value, list) else value
        for name, value in vars(namespace).items()
        if name.startswith("-") or (name in SETTINGS and value is not None)
    }
    config = load_config(flags, os.environ, vars(namespace).get("config"), ambient=ambient)
    set_up_logging(config.settings.log_level, config.settings.log_format)
    for note in config.notes:
        log.info("%s", note)
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
