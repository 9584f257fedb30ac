"""Where settings come from: flags, then environment variables, then a TOML file, then the defaults.

Other servers have other names for some settings. Those are understood wherever a setting is, and put as ours
(`foreign`).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.config.field import VALUE_KINDS_IN_WORDS, VARIABLE_PREFIX, Setting
from ingot.config.foreign import SERVERS, VARIABLES, ForeignName, find_foreign, nearest_known, put_as_ours
from ingot.config.settings import SETTINGS, Settings
from ingot.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SourceValue:
    """A setting's value from one source: where it came from, and what errors call it. `foreign` is the name of another
    server that stood for it; `part` says of what part of the setting that one tells."""

    option: Setting
    value: Any
    origin: str
    label: str
    foreign: ForeignName | None = None
    part: str = ""

    def validate(self) -> Any:
        return self.option.validate(self.value, self.label)


@dataclass(frozen=True, slots=True)
class ForeignValue:
    """What one source has under a name of other servers. `ambient`: a variable that may be meant for another server."""

    name: ForeignName
    value: Any
    origin: str
    label: str
    ambient: bool = False


def translate_foreign_values(source: Iterable[SourceValue | ForeignValue], notes: list[str]) -> list[SourceValue]:
    """The values of one source, one for each setting, all as ours. What is accepted with a note is in `notes`. Raises
    ConfigError for what cannot be honoured, and where two names say different things."""
    by_setting: dict[str, list[SourceValue]] = {}
    for each in source:
        for value in [each] if isinstance(each, SourceValue) else _translate(each, notes):
            by_setting.setdefault(value.option.name, []).append(value)
    return [_join(_without_refined(values)) for values in by_setting.values()]


def _translate(given: ForeignValue, notes: list[str]) -> Iterator[SourceValue]:
    row = given.name.row
    if given.value == "":  # an empty variable says nothing
        return
    try:
        found = put_as_ours(given.name, given.value)
    except ConfigError as error:
        if given.ambient and row.does != "maps":
            notes.append(f"{given.label} is not used: {error.message}")
            return
        hint = f" (ingot reads this variable of {SERVERS[row.of[0]]}'s, too)" if given.ambient else ""
        raise ConfigError(f"{given.label}: {error.message}{hint}") from None
    if row.note and (found or row.does == "always"):
        notes.append(f"{given.label}: {row.note}")
    for target, raw in found.items():
        name, _, part = target.partition(":")
        option = SETTINGS[name]
        if option.kind is dict and part:
            value: Any = {part: raw}
        else:
            value = _from_text(option, raw, given.label) if isinstance(raw, str) else raw
        yield SourceValue(option, value, given.origin, given.label, given.name, part)


def _without_refined(values: list[SourceValue]) -> list[SourceValue]:
    refined = {name for each in values if each.foreign is not None for name in each.foreign.row.refines}
    return [each for each in values if each.foreign is None or each.foreign.name not in refined]


def _join(values: list[SourceValue]) -> SourceValue:
    """One value for what several names of a source say of a setting: proposers and lists are joined, and parts put
    together. Raises ConfigError where they say different things."""
    first = values[0]
    if len(values) == 1 and not (first.part and first.option.kind is str):
        return first
    checked = [each.validate() for each in values]
    origin, label = (" and ".join(dict.fromkeys(parts)) for parts in _origins_and_labels(values))
    apart = all(each.foreign is not None for each in values)
    value: Any
    if first.option.kind is dict:
        value = {}
        for each in checked:
            _refuse_differences(values, [{**each, **value}, {**value, **each}])
            value |= each
    elif first.option.kind is tuple:
        value = tuple(dict.fromkeys(part for each in checked for part in each))
    elif first.option.name == "speculate" and apart:
        value = ",".join(dict.fromkeys(checked))
    elif all(each.part for each in values):
        value = _join_parts(values)
    else:
        _refuse_differences(values, checked)
        value = checked[0]
    return SourceValue(first.option, value, origin, label)


def _join_parts(values: list[SourceValue]) -> str:
    """A codec for keys and one for values."""
    halves: dict[str, str] = {}
    for each in values:
        _refuse_differences(values, [halves.setdefault(each.part, each.value), each.value])
    keys, others = halves.get("keys", "raw"), halves.get("values", "raw")
    return keys if keys == others else f"{keys}/{others}"


def _origins_and_labels(values: list[SourceValue]) -> tuple[list[str], list[str]]:
    return [each.origin for each in values], [each.label for each in values]


def _refuse_differences(values: list[SourceValue], says: Sequence[Any]) -> None:
    if any(each != says[0] for each in says):
        labels = " and ".join(dict.fromkeys(each.label for each in values))
        raise ConfigError(f"{labels} say different things: give one of them")


OTHER_VARIABLES = frozenset(
    {
        *("INGOT_AS", "INGOT_CONFIG", "INGOT_KERNELS", "INGOT_THREADS", "INGOT_ISA", "INGOT_MEASURED"),
        *("INGOT_CONTROL", "INGOT_WATCH", "INGOT_GROUP_TOKEN", "INGOT_LISTEN", "INGOT_RESTARTS"),
    }
)
"""Variables with our prefix that are not settings: the path of the file, the kernels of one process, a rank's group,
and when a process was restarted."""
BOOLEAN_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


@dataclass(frozen=True, slots=True)
class Config:
    """The settings, the file that was read, and where each value came from: `default`, `file PATH`,
    `env INGOT_X`, `flag --x` or `argument X`."""

    settings: Settings
    origins: Mapping[str, str]
    file: Path | None
    notes: tuple[str, ...] = ()  # of names of other servers


def load_config(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None, *, ambient: bool = False
) -> Config:
    """`flags` has only the flags that were used: by setting, or as they were written if they are other servers'. `file`
    is the argument of `--config`. With `ambient`, other servers' variables count as well, where nothing else is said.

    Raises ConfigError, naming the flag, variable or key at fault and the nearest known one.
    """
    path = _file_path(environ, file)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(SETTINGS, "default")
    notes: list[str] = []
    for source in (_from_flags(flags), _from_variables(environ), _from_file(path)):  # the strongest first
        _settle(translate_foreign_values(source, notes), values, origins)
    if ambient:
        unsaid = [each for each in _from_other_servers(environ) if each.name.row.to not in values]
        _settle(translate_foreign_values(unsaid, notes), values, origins)
    try:
        return Config(Settings(**values), origins, path, tuple(notes))
    except ConfigError as error:
        if error.message.startswith("host ") and origins["host"] == "env OLLAMA_HOST":
            raise ConfigError(f"OLLAMA_HOST: {error.message}, which goes before it") from None
        raise


def _settle(found: Iterable[SourceValue], values: dict[str, Any], origins: dict[str, str]) -> None:
    """Add the values of one source to those of stronger ones."""
    for each in found:
        value = each.validate()
        if each.option.name not in values:
            values[each.option.name], origins[each.option.name] = value, each.origin


def _from_file(path: Path | None) -> Iterator[SourceValue | ForeignValue]:
    for name, raw in _read_toml(path).items() if path is not None else ():
        label, origin = f"{path}: {name}", f"file {path}"
        known = _find_setting(name)
        if known is None:
            raise _unknown_name(name, f"{path}: unknown key", SETTINGS, key_of_flag)
        if isinstance(known, ForeignName):
            yield ForeignValue(known, raw, origin, label)
        else:
            yield SourceValue(known, known.from_toml(raw, label), origin, label)


def _from_variables(environ: Mapping[str, str]) -> Iterator[SourceValue | ForeignValue]:
    variables = {option.variable: option for option in SETTINGS.values()}
    for name, raw in environ.items():
        if name.startswith(VARIABLE_PREFIX) and name not in OTHER_VARIABLES:
            known = _find_setting(name.removeprefix(VARIABLE_PREFIX).lower())
            if known is None or name != name.upper():
                known_names = [*variables, *OTHER_VARIABLES]
                raise _unknown_name(name, "unknown variable", known_names, variable_of_flag)
            if isinstance(known, ForeignName):
                yield ForeignValue(known, raw, f"env {name}", name)
            else:
                yield SourceValue(known, _from_text(known, raw, name), f"env {name}", name)


def _from_other_servers(environ: Mapping[str, str]) -> Iterator[ForeignValue]:
    for name, raw in environ.items():
        if VARIABLES.fullmatch(name) and (known := find_foreign(name)) is not None:
            yield ForeignValue(known, raw, f"env {name}", name, ambient=True)


def _from_flags(flags: Mapping[str, Any]) -> Iterator[SourceValue | ForeignValue]:
    for name, raw in flags.items():
        known = find_foreign(name) if name.startswith("-") else _find_setting(name)
        if known is None:
            raise _unknown_name(name, "unknown flag", SETTINGS, key_of_flag)
        if isinstance(known, ForeignName):
            label = name if name.startswith("-") else flag_of_key(name)
            yield ForeignValue(known, raw, f"flag {label}", label)
        else:
            label = known.positional or known.flag
            origin = f"argument {label}" if known.positional else f"flag {label}"
            yield SourceValue(known, _from_text(known, raw, label) if isinstance(raw, str) else raw, origin, label)


def flag_of_key(name: str) -> str:
    return "--" + name.replace("_", "-")


def key_of_flag(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def variable_of_flag(flag: str) -> str:
    return VARIABLE_PREFIX + key_of_flag(flag).upper()


def _find_setting(name: str) -> Setting | ForeignName | None:
    """The setting of that name, or what other servers have as a flag of that name."""
    return SETTINGS.get(name) or find_foreign(flag_of_key(name))


def _unknown_name(name: str, what: str, own: Iterable[str], spelled: Callable[[str], str]) -> ConfigError:
    near = nearest_known(name, own, spelled)
    return ConfigError(f"{what} {name}" + (f"; did you mean {near}?" if near else ""))


def _file_path(environ: Mapping[str, str], file: Path | None) -> Path | None:
    if file is not None:
        return file.expanduser()
    if path := environ.get("INGOT_CONFIG"):
        return Path(path).expanduser()
    default = Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "ingot" / "config.toml"
    return default if default.is_file() else None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # broken TOML or broken UTF-8
        hint = ". Settings are TOML and not YAML: port = 8000" if path.suffix in (".yaml", ".yml") else ""
        raise ConfigError(f"{path} is not valid TOML: {error}{hint}") from error


def _from_text(option: Setting, text: str, label: str) -> Any:
    """A value from a flag or a variable. An empty text unsets an optional value that is not a secret."""
    if text == "" and option.optional and not option.secret:
        return None
    if option.switch:
        return BOOLEAN_WORDS.get(text.strip().lower(), text)
    if option.kind is bool:
        if text.strip().lower() not in BOOLEAN_WORDS:
            raise ConfigError(f"{label}: {text!r} is neither true nor false")
        return BOOLEAN_WORDS[text.strip().lower()]
    if option.kind in (int, float):
        try:
            return option.kind(text)
        except ValueError:
            raise ConfigError(f"{label}: {text!r} is not {VALUE_KINDS_IN_WORDS[option.kind]}") from None
    if option.kind is tuple:
        return tuple(part for piece in text.split(",") if (part := piece.strip()))
    if option.kind is dict:
        return _parse_object(text, label)
    return Path(text) if option.kind is Path and text else text


def _parse_object(text: str, label: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{label}: {text[:100]!r} is not valid JSON") from None
