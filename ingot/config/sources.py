"""Where settings come from: flags, then environment variables, then a TOML file, then the defaults.

Other servers have other names for some settings. Those are understood wherever a setting is, and translated to ours.
"""

# ruff: noqa: RUF009  (`setting` is dataclasses.field with a help text in its metadata)

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ingot.config.checks import problem_from
from ingot.config.field import VALUE_KINDS_IN_WORDS, VARIABLE_PREFIX, Setting, setting, settings_of
from ingot.config.settings import SETTINGS, Settings
from ingot.errors import ConfigError, nearest_name

LOOKUP_METHODS: Final = frozenset({"ngram", "ngram_gpu", "suffix"})
"""vLLM's methods that find draft tokens in texts."""
DRAFT_METHODS: Final = {"draft_model": "draft", "eagle3": "eagle"}
"""vLLM's methods that need a model of their own, and our names of them."""
MTP_METHOD: Final = re.compile(r"(\w+_)?mtp", re.ASCII)
"""vLLM's methods whose draft head is part of the model: one for each family."""
SPECULATION_METHODS: Final = ("mtp", "ngram", "suffix", *DRAFT_METHODS)
"""The methods that an error lists."""
SPECULATION_KEYS: Final = ("method", "model", "num_speculative_tokens")
UNKNOWN_KEY: Final = f"is not known; known are {', '.join(SPECULATION_KEYS)}"
UNSUPPORTED_KEYS: Final = {
    **dict.fromkeys(
        ("prompt_lookup_max", "prompt_lookup_min"), "is not supported: the longest match is used. Leave it out"
    ),
    **dict.fromkeys(
        (
            *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
            *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
        ),
        "is not supported: the number of draft tokens follows from measurements. Leave it out",
    ),
    "disable_by_batch_size": "is not supported: speculation stops by itself when it does not pay. Leave it out",
    "draft_tensor_parallel_size": "is not supported: a draft runs on one device, rank 0's. Send 1, or leave it out",
}
"""vLLM's keys that cannot be honoured, with the reason."""
HARMLESS_VALUES: Final = (("draft_tensor_parallel_size", 1),)
"""Values of unsupported keys that change nothing."""

KV_EVENT_SETTINGS: Final = {"endpoint": "kv_events", "replay_endpoint": "kv_events_replay", "topic": "kv_events_topic"}
"""vLLM's keys of KV events, and our settings."""
KV_DTYPES: Final = {
    "auto": "raw",
    "int8_per_token_head": "affine8",
    "turboquant_k8v4": "k8v4",
    "turboquant_4bit_nc": "turbo4",
    "turboquant_k3v4_nc": "turbo3/turbo4",
    "turboquant_3bit_nc": "turbo3",
}
"""vLLM's names of KV cache dtypes, and our codecs with as many bits."""


@dataclass(frozen=True, slots=True)
class SourceValue:
    """A setting's value from one source: where it came from, and what errors call it."""

    option: Setting
    value: Any
    origin: str
    label: str

    def validate(self) -> Any:
        return self.option.validate(self.value, self.label)


def must_be_on_problem(on: bool) -> str | None:
    return None if on else "it can only be switched on; --speculate chooses the proposers, and off switches them off"


def quantization_problem(on: bool) -> str | None:
    return None if on else "it can only be switched on; --cache-codec raw is the same as without it"


def dtype_problem(dtype: str) -> str | None:
    if dtype in KV_DTYPES:
        return None
    if dtype in ("float16", "bfloat16"):
        return "the KV cache has the model's own dtype: use auto"
    if dtype.startswith("fp8"):
        return "8-bit floats are not supported; --kv-codec affine8 has as many bits"
    return f"{dtype[:100]!r} is not known; known are {', '.join(KV_DTYPES)}"


def draft_model_problem(model: str) -> str | None:
    return "the name of a draft model must not contain a comma" if "," in model else None


def read_speculative_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Our settings for vLLM's. Raises ConfigError, naming the key, for what cannot be honoured."""
    keys = {name: value for name, value in config.items() if value is not None and (name, value) not in HARMLESS_VALUES}
    for name in keys:
        if name not in SPECULATION_KEYS:
            raise ConfigError(f"{name[:100]!r} {UNSUPPORTED_KEYS.get(name, UNKNOWN_KEY)}")
    for name in ("method", "model"):
        if not isinstance(keys.get(name, name), str) or keys.get(name) == "":
            raise ConfigError(f"{name!r} must be the name of a {name}")
    if "method" not in keys and "model" not in keys:
        raise ConfigError("it has neither a 'method' nor a 'model'")
    settings: dict[str, Any] = {"speculate": _proposer_name(keys.get("method", "draft_model"), keys.get("model"))}
    if "num_speculative_tokens" in keys:
        settings["speculate_tokens"] = keys["num_speculative_tokens"]
    return settings


def _proposer_name(method: str, model: str | None) -> str:
    if method in DRAFT_METHODS:
        if model is None:
            raise ConfigError(f"the method {method!r} needs a 'model'")
        if (problem := draft_model_problem(model)) is not None:
            raise ConfigError(f"'model': {problem}")
        return f"{DRAFT_METHODS[method]}:{model}"
    mtp = MTP_METHOD.fullmatch(method) is not None
    if not mtp and method not in LOOKUP_METHODS:
        raise ConfigError(f"the method {method[:100]!r} is not known; known are {', '.join(SPECULATION_METHODS)}")
    if model is not None:
        raise ConfigError(f"the method {method!r} takes no 'model' of its own: leave it out")
    return "mtp" if mtp else "lookup"


def read_kv_events_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Our settings for vLLM's. Raises ConfigError, naming the key, for what cannot be honoured."""
    keys = {name: value for name, value in config.items() if value is not None}
    on, publisher = keys.pop("enable_kv_cache_events", False), keys.pop("publisher", "zmq")
    if not isinstance(on, bool):
        raise ConfigError("'enable_kv_cache_events' must be true or false")
    if publisher not in ("zmq", "null"):
        raise ConfigError(f"the publisher {str(publisher)[:100]!r} is not known; known are zmq and null")
    for name, value in keys.items():
        if name not in KV_EVENT_SETTINGS:
            raise ConfigError(f"{name[:100]!r} is not known; known are {', '.join(KV_EVENT_SETTINGS)}")
        if not isinstance(value, str):
            raise ConfigError(f"{name!r} must be text")
    if not on or publisher == "null":
        return {}
    return {KV_EVENT_SETTINGS[name]: value for name, value in {"endpoint": "tcp://*:5557", **keys}.items()}


@dataclass(frozen=True, slots=True)
class ForeignSettings:
    speculative_config: dict[str, Any] | None = setting(
        None,
        'vLLM\'s form of --speculate and --speculate-tokens, as JSON: {"method": "mtp", "num_speculative_tokens": 3}',
        section="names that other servers use",
        check=problem_from(read_speculative_config),
    )
    enable_mtp: bool = setting(False, "the same as --speculate mtp", check=must_be_on_problem)
    suffix_decoding: bool = setting(False, "the same as --speculate lookup", check=must_be_on_problem)
    draft_model: str | None = setting(None, "the same as --speculate draft:MODEL", check=draft_model_problem)
    turbo_kv_bits: int | None = setting(None, "the same as --cache-codec turboN", low=1, high=4)
    kv_cache_quantization: bool = setting(False, "the same as --cache-codec affine8", check=quantization_problem)
    kv_cache_dtype: str | None = setting(
        None,
        f"vLLM's form of --kv-codec: {', '.join(KV_DTYPES)}; each stands for our codec with as many bits",
        check=dtype_problem,
    )
    kv_events_config: dict[str, Any] | None = setting(
        None,
        "vLLM's form of --kv-events, --kv-events-replay and --kv-events-topic, as JSON: "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}',
        check=problem_from(read_kv_events_config),
    )
    num_draft_tokens: int | None = setting(None, "the same as --speculate-tokens")
    mtp_num_draft_tokens: int | None = setting(None, "the same as --speculate-tokens")


FOREIGN_SETTINGS: Final[Mapping[str, Setting]] = {option.name: option for option in settings_of(ForeignSettings)}
TRANSLATIONS: Final[Mapping[str, Callable[[Any], Mapping[str, Any]]]] = {
    "speculative_config": read_speculative_config,
    "enable_mtp": lambda on: {"speculate": "mtp"},
    "suffix_decoding": lambda on: {"speculate": "lookup"},
    "draft_model": lambda model: {"speculate": f"draft:{model}"},
    "turbo_kv_bits": lambda bits: {"cache_codec": f"turbo{bits}"},
    "kv_cache_quantization": lambda on: {"cache_codec": "affine8"},
    "kv_cache_dtype": lambda dtype: {"kv_codec": KV_DTYPES[dtype]},
    "kv_events_config": read_kv_events_config,
    "num_draft_tokens": lambda tokens: {"speculate_tokens": tokens},
    "mtp_num_draft_tokens": lambda tokens: {"speculate_tokens": tokens},
}
"""Our settings and their values for each foreign setting's value."""


def translate_foreign_settings(source: Iterable[SourceValue]) -> list[SourceValue]:
    """The values of one source, foreign settings translated to ours. Raises ConfigError if two say the same thing."""
    own: list[SourceValue] = []
    translated: list[SourceValue] = []
    for each in source:
        if each.option.name not in FOREIGN_SETTINGS:
            own.append(each)
        elif each.validate() is not None:
            translated += _translate(each)
    proposers = [each for each in translated if each.option.name == "speculate"]
    others = [each for each in translated if each.option.name != "speculate"]
    values = [*own, *_join_proposers(proposers), *others]
    _refuse_repeated(values)
    return values


def _translate(foreign: SourceValue) -> Iterator[SourceValue]:
    for name, value in TRANSLATIONS[foreign.option.name](foreign.value).items():
        yield SourceValue(SETTINGS[name], value, foreign.origin, foreign.label)


def _join_proposers(proposers: Sequence[SourceValue]) -> list[SourceValue]:
    """Several proposers may be chosen by one foreign setting each."""
    if not proposers:
        return []
    origin, label = (
        " and ".join(parts) for parts in zip(*((each.origin, each.label) for each in proposers), strict=True)
    )
    return [SourceValue(proposers[0].option, ",".join(each.value for each in proposers), origin, label)]


def _refuse_repeated(values: Sequence[SourceValue]) -> None:
    for value in values:
        labels = [other.label for other in values if other.option is value.option]
        if len(labels) > 1:
            raise ConfigError(f"{' and '.join(labels)} say the same thing: give one of them")


OTHER_VARIABLES = frozenset(
    {
        *("INGOT_AS", "INGOT_CONFIG", "INGOT_KERNELS", "INGOT_THREADS", "INGOT_ISA", "INGOT_MEASURED"),
        *("INGOT_CONTROL", "INGOT_WATCH", "INGOT_GROUP_TOKEN", "INGOT_LISTEN", "INGOT_RESTARTS"),
    }
)
"""Variables with our prefix that are not settings: the path of the file, the kernels of one process, a rank's group,
and when a process was restarted."""
ALL_SETTINGS: Mapping[str, Setting] = {**SETTINGS, **FOREIGN_SETTINGS}
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


def load_config(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None) -> Config:
    """`flags` has only the flags that were used, by setting; `file` is the argument of `--config`.

    Raises ConfigError, naming the flag, variable or key at fault and the nearest known one.
    """
    path = _file_path(environ, file)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(SETTINGS, "default")
    for source in (_from_file(path), _from_variables(environ), _from_flags(flags)):  # the weakest first
        for each in translate_foreign_settings(source):
            values[each.option.name] = each.validate()
            origins[each.option.name] = each.origin
    return Config(Settings(**values), origins, path)


def _from_file(path: Path | None) -> Iterable[SourceValue]:
    for name, raw in _read_toml(path).items() if path is not None else ():
        option, label = _find_setting(name, f"{path}: unknown key", ALL_SETTINGS), f"{path}: {name}"
        yield SourceValue(option, option.from_toml(raw, label), f"file {path}", label)


def _from_variables(environ: Mapping[str, str]) -> Iterable[SourceValue]:
    variables = {option.variable: option for option in ALL_SETTINGS.values()}
    for name, raw in environ.items():
        if name.startswith(VARIABLE_PREFIX) and name not in OTHER_VARIABLES:
            option = _find_setting(name, "unknown variable", variables, OTHER_VARIABLES)
            yield SourceValue(option, _from_text(option, raw, name), f"env {name}", name)


def _from_flags(flags: Mapping[str, Any]) -> Iterable[SourceValue]:
    for name, raw in flags.items():
        option = _find_setting(name, "unknown flag", ALL_SETTINGS)
        label = option.positional or option.flag
        origin = f"argument {label}" if option.positional else f"flag {label}"
        yield SourceValue(option, _from_text(option, raw, label) if isinstance(raw, str) else raw, origin, label)


def _find_setting(name: str, what: str, table: Mapping[str, Setting], also: frozenset[str] = frozenset()) -> Setting:
    if name in table:
        return table[name]
    near = nearest_name(name, [*table, *also])
    raise ConfigError(f"{what} {name}" + (f"; did you mean {near}?" if near else ""))


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
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _from_text(option: Setting, text: str, label: str) -> Any:
    """A value from a flag or a variable. An empty text unsets an optional value that is not a secret."""
    if text == "" and option.optional and not option.secret:
        return None
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
