"""One frozen settings object. Flags, `INGOT_*` variables and a TOML file all map to it, and nowhere else.

A field's metadata holds its help text and its limits; its flag is `--field-name`, its variable
`INGOT_FIELD_NAME`, its key in the file `field_name`. Precedence: flag, then variable, then file, then the
default here. A `Settings` that exists is valid: every limit is checked when one is made, whoever makes it.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ingot.errors import ConfigError, nearest
from ingot.text.formats.registry import format_problem, thinking_problem
from ingot.text.prompt.prompt_files import prompt_file_problem
from ingot.text.tokens.generation_config import setting_problem as generation_config_problem

DEFAULT_MODEL = "smollm2-135m"
LEAST_KEY_CHARS = 8  # fewer are soon guessed
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PREFIX = "INGOT_"
# Variables with our prefix that are no settings: the file's place, and the choice of kernels for one process.
OTHER_VARIABLES = frozenset({"INGOT_AS", "INGOT_CONFIG", "INGOT_KERNELS", "INGOT_THREADS", "INGOT_ISA"})

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1 << 40}
_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def memory_bytes(text: str, total: int) -> int:
    """What `12GB`, `800MiB` or `60%` means on a device with `total` bytes. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*(%|[KMGT]?i?B)\s*", text, re.IGNORECASE | re.ASCII)
    if match is None:
        raise ConfigError(f"{text!r} is no amount of memory; write it like 12GB, 800MiB or 60%")
    number, unit = float(match[1]), match[2].upper()
    amount = int(total * number / 100) if unit == "%" else int(number * _UNITS[unit])
    if not 0 < amount <= total:
        raise ConfigError(f"{text} is {amount} bytes; the memory here is {total} bytes")
    return amount


def _memory_problem(text: str) -> str | None:
    try:
        memory_bytes(text, 1 << 62)
    except ConfigError as error:
        return error.message
    return None


def _key_problem(key: str) -> str | None:
    return None if re.fullmatch(r"[!-~]+", key) else "a key is made of visible ASCII characters, without spaces"


def own_key_problem(key: str) -> str | None:
    """What is wrong with a key that this server is to ask for. Other servers' may be as short as those like."""
    short = f"a key has at least {LEAST_KEY_CHARS} characters" if len(key) < LEAST_KEY_CHARS else None
    return _key_problem(key) or short


def read_keys(path: Path) -> tuple[str, ...]:
    """The API keys in a file: one a line; empty lines and those that begin with # are none. Raises ConfigError."""
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    found = {number: line.strip() for number, line in enumerate(lines, start=1)}
    keys = {number: line for number, line in found.items() if line and not line.startswith("#")}
    for number, key in keys.items():
        if (problem := own_key_problem(key)) is not None:
            raise ConfigError(f"{path}, line {number}: {problem}")
    if not keys:
        raise ConfigError(f"{path} holds no key")
    return tuple(dict.fromkeys(keys.values()))


def _key_file_problem(path: Path) -> str | None:
    try:
        read_keys(path)
    except ConfigError as error:
        return error.message
    return None


def _mcp_problem(path: Path) -> str | None:
    from ingot.mcp.config import read_servers, require_sdk

    try:
        require_sdk()
        read_servers(path)
    except ConfigError as error:
        return error.message
    return None


def _host_problem(hosts: tuple[str, ...]) -> str | None:
    wrong = [host for host in hosts if not re.fullmatch(r"[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]+\]?", host)]
    return f"{wrong[0]!r} is no host name (no scheme, no port, no wildcard)" if wrong else None


def _origin_problem(origins: tuple[str, ...]) -> str | None:
    wrong = [origin for origin in origins if not re.fullmatch(r"https?://[A-Za-z0-9.\[\]:_-]+", origin)]
    return f"{wrong[0]!r} is no origin; write it like https://chat.example.org" if wrong else None


def _names_problem(names: tuple[str, ...]) -> str | None:
    wrong = [name for name in names if "*" in name or "=" in name or not name.isprintable() or len(name) > 256]
    return f"{wrong[0][:100]!r} is no name for a model; patterns go with --alias" if wrong else None


def _alias_problem(aliases: tuple[str, ...]) -> str | None:
    for alias in aliases:
        name, equals, target = alias.partition("=")
        if not (name and equals and target) or not alias.isprintable() or len(alias) > 512:
            return f"{alias[:100]!r} is no alias; write it like gpt-4o=default or claude-*=default"
    return None


def _override_problem(overrides: dict[str, Any]) -> str | None:
    from ingot.protocol.chat.sampling_defaults import override_problem

    return override_problem(overrides)


def _variables_problem(variables: dict[str, Any]) -> str | None:
    from ingot.protocol.schema.template_variables import variables_problem

    return variables_problem(variables)


def setting(default: Any, help: str, **metadata: Any) -> Any:
    """A field of `Settings`. Metadata: section (kept by the fields that follow), positional (the argument
    in place of a flag), low, high, choices, secret, check (value -> problem or None)."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, slots=True)
class Settings:
    model: str = setting(
        DEFAULT_MODEL,
        "local folder, .gguf file, hub id, or the name of a packaged model",
        section="the model",
        positional="MODEL",
    )
    models_dir: Path = setting(Path("~/.cache/ingot/models"), "where fetched and converted models are kept")  # noqa: RUF009
    offline: bool = setting(False, "never use the network: only models that are already here")
    context: int | None = setting(
        None, "longest sequence, in tokens (default: what the model was trained for)", low=1, high=1 << 24
    )
    dtype: str | None = setting(
        None,
        "float32, bfloat16 or float16, of weights and states (default: what suits the device)",
        choices=("float32", "bfloat16", "float16"),
    )
    served_model_name: tuple[str, ...] = setting(
        (), "names to serve the model under instead of its own; answers carry the first", check=_names_problem
    )
    alias: tuple[str, ...] = setting(
        (), "further names, also patterns, for served models: claude-*=default", check=_alias_problem
    )
    chat_template: Path | None = setting(None, "a Jinja file to use instead of the model's own chat template")  # noqa: RUF009
    template_history: str = setting(
        "stable",
        "stable: past turns stay in the prompt as they were computed; official: as the chat template rewrites them",
        choices=("stable", "official"),
    )
    trust_special_tokens: bool = setting(
        False,
        "let the text of control tokens, such as <|im_end|>, in messages, tools and their results be those tokens",
    )

    tool_format: str | None = setting(
        None, "how the model writes tool calls (default: what its chat template shows)", check=format_problem
    )
    thinking_format: str | None = setting(
        None, "how the model marks its thinking (default: what its chat template shows)", check=thinking_problem
    )
    generation_config: str = setting(
        "auto",
        "whose generation_config.json says how tokens are chosen where a request does not: auto for the model's own, "
        "none, or a folder",
        check=generation_config_problem,
    )
    override_generation_config: dict[str, Any] | None = setting(  # noqa: RUF009
        None,
        'what to use instead of it, as JSON: {"temperature": 0.6}; known are temperature, top_p, top_k, min_p and '
        "repetition_penalty",
        check=_override_problem,
    )
    default_chat_template_kwargs: dict[str, Any] | None = setting(  # noqa: RUF009
        None, "variables of the chat template, as JSON, where a request does not set them", check=_variables_problem
    )
    thinking: str = setting(
        "auto",
        "on, off, or auto for what the chat template does, where a request says nothing",
        choices=("on", "off", "auto"),
    )
    thinking_budget: int | None = setting(
        None, "most tokens of thinking, where a request says nothing (default: no limit)", low=0, high=1 << 24
    )

    embedding_model: str | None = setting(
        None, "a model that makes vectors of texts, given like MODEL (none by default)", section="further models"
    )
    rerank_model: str | None = setting(
        None, "a model that scores documents against a query, given like MODEL (none by default)"
    )

    host: str = setting("127.0.0.1", "address to listen on; anything but loopback needs an API key", section="the door")
    port: int = setting(8000, "port to listen on (0: any free one)", low=0, high=65535)
    api_key: str | None = setting(
        None, "key that clients must send (Bearer or x-api-key)", secret=True, check=_key_problem
    )
    api_key_file: Path | None = setting(  # noqa: RUF009
        None, "a file of further keys, one a line; each key is a tenant of its own", check=_key_file_problem
    )
    admin_api_key: str | None = setting(
        None,
        "the administrator's key: a tenant like any other, who may also import kept prompts and see totals",
        secret=True,
        check=own_key_problem,
    )
    allowed_hosts: tuple[str, ...] = setting(
        (), "extra Host names to answer to, besides the listening address", check=_host_problem
    )
    cors_origins: tuple[str, ...] = setting(
        (), "origins that browsers may call from (none by default)", check=_origin_problem
    )
    strict: bool = setting(False, "refuse requests that hold an unknown field")
    max_connections: int = setting(
        1024,
        "most connections open at once; where none is idle and can make room, one more is refused with 503",
        low=1,
        high=1 << 20,
    )
    max_body_bytes: int = setting(16 * MIB, "largest request body", low=1, high=GIB)
    max_held_bytes: int | None = setting(
        None, "most bytes of request bodies held at once (default: 16 of the largest)", low=1, high=1 << 40
    )
    max_import_bytes: int = setting(4 * GIB, "largest file that `ingot cache import` may send", low=0, high=1 << 44)
    max_header_bytes: int = setting(32 * KIB, "largest request head", low=256, high=MIB)
    max_json_depth: int = setting(64, "deepest nesting of a JSON body", low=1, high=512)
    keepalive_s: float = setting(
        10.0, "seconds of silence after which a stream gets a keep-alive comment", low=0.01, high=3600.0
    )
    idle_event_s: float = setting(
        25.0,
        "seconds without an event after which a stream gets an empty one, for clients that heed no comments",
        low=0.01,
        high=3600.0,
    )
    request_timeout_s: float = setting(
        3600.0, "longest time a request may take, queueing included", low=0.01, high=30 * 86400.0
    )

    memory: str | None = setting(
        None,
        "memory budget for weights and sequences, such as 12GB or 60% (default: what the device can spare)",
        section="the engine",
        check=_memory_problem,
    )
    prefix_cache: bool = setting(True, "keep what was computed of prompts and answers, for requests that begin alike")
    cache_memory: str | None = setting(
        None,
        "the part of the budget that kept prefixes may take, such as 2GB or 30% (default: half of what is free)",
        check=_memory_problem,
    )
    archive_key_file: Path = setting(  # noqa: RUF009
        Path("~/.local/share/ingot/archive.key"),
        "the secret that `ingot cache export` seals files with and import asks for; made at its first use",
    )
    warm_prompts: Path | None = setting(  # noqa: RUF009
        None,
        "a file of prompts to compute when the server starts and nothing else runs, and to keep: JSON, JSON Lines or "
        "one system prompt as text",
        check=prompt_file_problem,
    )
    max_sequences: int = setting(32, "most sequences computed together", low=1, high=4096)
    max_queue: int = setting(256, "most sequences waiting; one more is refused with 429", low=0, high=1_000_000)
    target_itl_ms: float = setting(
        100.0,
        "longest wanted time between two tokens of a stream while others prefill",
        low=1.0,
        high=60_000.0,
    )
    prefill_chunk: int = setting(2048, "most prompt tokens computed in one step", low=1, high=1 << 20)
    deterministic: bool = setting(
        False, "on Linux CPUs, compute a token in one way however many are computed with it: the same text, slower"
    )

    mcp_config: Path | None = setting(  # noqa: RUF009
        None,
        "a file of MCP servers, whose tools requests to /v1/responses may ask this server to call",
        section="tools and stored responses",
        check=_mcp_problem,
    )
    responses_store: str = setting(
        "~/.local/share/ingot/responses.db",
        "the file in which /v1/responses are stored, or off to store none",
        section="stored responses",
    )
    responses_rows: int = setting(
        10_000, "most stored responses; of the key with most, the oldest go first", low=1, high=10_000_000
    )
    responses_bytes: int = setting(GIB, "most bytes of stored responses", low=MIB, high=1 << 50)
    responses_days: float = setting(30.0, "days after which a stored response is forgotten", low=0.001, high=36_500.0)

    log_level: str = setting(
        "info",
        "debug, info, warning or error",
        section="the rest",
        choices=("debug", "info", "warning", "error"),
    )

    def __post_init__(self) -> None:
        for known in SETTINGS.values():
            value = _checked(known, getattr(self, known.name), known.name)
            object.__setattr__(self, known.name, value)
        if self.warm_prompts is not None and not self.prefix_cache:
            raise ConfigError("warm_prompts keeps what it computes, which prefix_cache = false forbids: choose one")
        if self.held_bytes < self.max_body_bytes:
            raise ConfigError(f"max_held_bytes is less than one body may have: {self.max_body_bytes} bytes")
        if not self.keyed and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host} can be reached from other machines, so an API key is needed: "
                "set INGOT_API_KEY or --api-key, or listen on 127.0.0.1"
            )

    @property
    def responses_path(self) -> Path | None:
        """Where responses are stored; None where none are."""
        return None if self.responses_store == "off" else Path(self.responses_store).expanduser()

    @property
    def held_bytes(self) -> int:
        """The most bytes of request bodies held at once."""
        return 16 * self.max_body_bytes if self.max_held_bytes is None else self.max_held_bytes

    @property
    def keyed(self) -> bool:
        """Whether clients must send a key."""
        return any(given is not None for given in (self.api_key, self.api_key_file, self.admin_api_key))


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of `Settings` as flags, variables and files see it."""

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

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


@dataclass(frozen=True, slots=True)
class Config:
    """The settings, the file that was read, and where each value came from: `default`, `file PATH`,
    `env INGOT_X`, `flag --x` or `argument X`."""

    settings: Settings
    origins: Mapping[str, str]
    file: Path | None


def _settings() -> Iterator[Setting]:
    hints = typing.get_type_hints(Settings)
    section = ""
    for each in fields(Settings):
        meta = each.metadata
        section = meta.get("section", section)
        kind, optional = _kind(hints[each.name])
        limits = {name: meta.get(name) for name in ("positional", "low", "high", "choices", "check")}
        secret = meta.get("secret", False)
        yield Setting(each.name, kind, optional, each.default, meta["help"], section, secret=secret, **limits)


def _kind(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) is types.UnionType:
        plain = [arm for arm in typing.get_args(hint) if arm is not types.NoneType]
        return typing.get_origin(plain[0]) or plain[0], True
    return typing.get_origin(hint) or hint, False


SETTINGS: Mapping[str, Setting] = {known.name: known for known in _settings()}


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def load(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None) -> Config:
    """Settle every value. `flags` holds only what was given, by field name; `file` is what `--config` named.

    Raises ConfigError, naming the flag, variable or key at fault and the nearest known one.
    """
    path = _file_path(environ, file)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(SETTINGS, "default")
    for known, value, origin, place in _sources(flags, environ, path):
        values[known.name] = _checked(known, value, place)
        origins[known.name] = origin
    return Config(Settings(**values), origins, path)


def _sources(
    flags: Mapping[str, Any], environ: Mapping[str, str], path: Path | None
) -> Iterator[tuple[Setting, Any, str, str]]:
    """(setting, typed value, origin, place to name in an error), weakest source first."""
    if path is not None:
        for name, raw in _read(path).items():
            known, place = _known(name, f"{path}: unknown key", SETTINGS), f"{path}: {name}"
            yield known, _from_toml(known, raw, place), f"file {path}", place
    variables = {known.variable: known for known in SETTINGS.values()}
    for name, raw in environ.items():
        if name.startswith(PREFIX) and name not in OTHER_VARIABLES:
            known = _known(name, "unknown variable", variables, OTHER_VARIABLES)
            yield known, _from_text(known, raw, name), f"env {name}", name
    for name, raw in flags.items():
        known = _known(name, "unknown flag", SETTINGS)
        origin = f"argument {known.positional}" if known.positional else f"flag {known.flag}"
        place = known.positional or known.flag
        yield known, _from_text(known, raw, place) if isinstance(raw, str) else raw, origin, place


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
        if text.strip().lower() not in _WORDS:
            raise ConfigError(f"{place}: {text!r} is neither true nor false")
        return _WORDS[text.strip().lower()]
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


def _from_toml(known: Setting, value: Any, place: str) -> Any:
    if known.kind is float and type(value) is int:
        return float(value)
    if known.kind is tuple and isinstance(value, list):
        return tuple(value)
    if known.kind is Path and isinstance(value, str) and value:
        path = Path(value).expanduser()
        if not path.is_absolute():
            raise ConfigError(f"{place}: a path in the file must be absolute or start with ~")
        return path
    return value


def _checked(known: Setting, value: Any, place: str) -> Any:
    """`value` within the setting's type and limits, paths with their ~ expanded; else ConfigError."""
    if value is None and known.optional:
        return None
    problem = _type_problem(known, value) or _limit_problem(known, value)
    if problem is None and known.check is not None:
        problem = known.check(value)
    if problem is not None:
        raise ConfigError(f"{place}: {problem}")
    return value.expanduser() if isinstance(value, Path) else value


_NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple: "a list of texts",
    dict: "a JSON object",
    Path: "a path",
}


def _type_problem(known: Setting, value: Any) -> str | None:
    number = known.kind is float and type(value) is int
    if not (isinstance(value, known.kind) or number) or (isinstance(value, bool) and known.kind is not bool):
        shown = "this" if known.secret else repr(value)
        return f"{shown} is not {_NAMES[known.kind]}"
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
        near = nearest(value, known.choices)
        return f"{value!r} is not one of {', '.join(known.choices)}" + (f"; did you mean {near}?" if near else "")
    return None
