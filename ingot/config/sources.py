"""Where settings come from: flags, then variables, then a TOML file, then the defaults.

Other servers know some settings by other names. Each is read as what it means here, wherever it stands: a flag, a
variable or the file.
"""

# ruff: noqa: RUF009  (`setting` is dataclasses.field with a help text in its metadata)

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ingot.config.field import VARIABLE_PREFIX, GivenSetting, Setting, setting, settings_of
from ingot.config.settings import SETTINGS, Settings
from ingot.errors import ConfigError, nearest_name

LOOKUP_METHODS: Final = frozenset({"ngram", "ngram_gpu", "suffix"})
"""vLLM's methods that find guesses in texts."""
DRAFT_METHODS: Final = {"draft_model": "draft", "eagle3": "eagle"}
"""Its methods that take a model of their own, and what we call them."""
MTP_METHOD: Final = re.compile(r"(\w+_)?mtp", re.ASCII)
"""Its methods whose head is part of the model: one for each family, which all mean that family's."""
SPECULATION_METHODS: Final = ("mtp", "ngram", "suffix", *DRAFT_METHODS)
"""The ones that an error names."""
SPECULATION_KEYS: Final = ("method", "model", "num_speculative_tokens")
UNKNOWN_KEY: Final = f"is not known; known are {', '.join(SPECULATION_KEYS)}"
UNSUPPORTED_KEYS: Final = {
    **dict.fromkeys(
        ("prompt_lookup_max", "prompt_lookup_min"), "is not supported: the longest match is found. Leave it out"
    ),
    **dict.fromkeys(
        (
            *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
            *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
        ),
        "is not supported: how much is guessed is measured. Leave it out",
    ),
    "disable_by_batch_size": "is not supported: guessing stops by itself where it does not pay. Leave it out",
    "draft_tensor_parallel_size": "is not supported: a draft runs on one device, rank 0's. Send 1, or leave it out",
}
"""Its keys that a recipe may hold and that cannot be honoured."""
HARMLESS_VALUES: Final = (("draft_tensor_parallel_size", 1),)
"""What asks for nothing."""

KV_EVENT_SETTINGS: Final = {"endpoint": "kv_events", "replay_endpoint": "kv_events_replay", "topic": "kv_events_topic"}
"""Keys of vLLM's that say where events of what is kept are told, and settings of ours."""
KV_DTYPES: Final = {
    "auto": "raw",
    "int8_per_token_head": "affine8",
    "turboquant_k8v4": "k8v4",
    "turboquant_4bit_nc": "turbo4",
    "turboquant_k3v4_nc": "turbo3/turbo4",
    "turboquant_3bit_nc": "turbo3",
}
"""vLLM's names for what live keys and values are in, and codecs of ours that have as many bits."""


@dataclass(frozen=True, slots=True)
class ForeignMeaning:
    """What a foreign setting says: who guesses ahead, as `speculate` takes it, and how many tokens; what kept prefixes
    are put into; what live keys and values are; or where events are told."""

    words: str | None = None
    tokens: Any = None
    codec: str | None = None
    live: str | None = None
    events: Mapping[str, str] = field(default_factory=dict)  # by our setting's name


def must_be_on_problem(on: bool) -> str | None:
    return None if on else "it can only be switched on; --speculate says who guesses ahead, and off for nobody"


def quantization_problem(on: bool) -> str | None:
    return None if on else "it can only be switched on; --cache-codec raw is what is without it"


def dtype_problem(dtype: str) -> str | None:
    if dtype in KV_DTYPES:
        return None
    if dtype in ("float16", "bfloat16"):
        return "states are of the model's own numbers: auto says that"
    if dtype.startswith("fp8"):
        return "there are no floats of 8 bits here; --kv-codec affine8 has as many bits"
    return f"{dtype[:100]!r} is not known; known are {', '.join(KV_DTYPES)}"


def draft_model_problem(model: str) -> str | None:
    return "a name with a comma cannot be told from several" if "," in model else None


def speculative_config_problem(config: dict[str, Any]) -> str | None:
    try:
        read_speculative_config(config)
    except ConfigError as error:
        return error.message
    return None


def events_problem(config: dict[str, Any]) -> str | None:
    try:
        read_kv_events_config(config)
    except ConfigError as error:
        return error.message
    return None


@dataclass(frozen=True, slots=True)
class ForeignSettings:
    speculative_config: dict[str, Any] | None = setting(
        None,
        "vLLM's way to say --speculate and --speculate-tokens, as JSON: "
        '{"method": "mtp", "num_speculative_tokens": 3}',
        section="the same in other servers' words",
        check=speculative_config_problem,
    )
    enable_mtp: bool = setting(False, "the same as --speculate mtp", check=must_be_on_problem)
    suffix_decoding: bool = setting(False, "the same as --speculate lookup", check=must_be_on_problem)
    draft_model: str | None = setting(None, "the same as --speculate draft:MODEL", check=draft_model_problem)
    turbo_kv_bits: int | None = setting(None, "the same as --cache-codec turboN", low=1, high=4)
    kv_cache_quantization: bool = setting(False, "the same as --cache-codec affine8", check=quantization_problem)
    kv_cache_dtype: str | None = setting(
        None,
        f"vLLM's way to say --kv-codec: {', '.join(KV_DTYPES)}; each is the codec of ours with as many bits",
        check=dtype_problem,
    )
    kv_events_config: dict[str, Any] | None = setting(
        None,
        "vLLM's way to say --kv-events, --kv-events-replay and --kv-events-topic, as JSON: "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}',
        check=events_problem,
    )
    num_draft_tokens: int | None = setting(None, "the same as --speculate-tokens")
    mtp_num_draft_tokens: int | None = setting(None, "the same as --speculate-tokens")


def read_speculative_config(config: Mapping[str, Any]) -> ForeignMeaning:
    """Raises ConfigError for whatever cannot be honoured, by its name."""
    said = {name: value for name, value in config.items() if value is not None and (name, value) not in HARMLESS_VALUES}
    for name in said:
        if name not in SPECULATION_KEYS:
            raise ConfigError(f"{name[:100]!r} {UNSUPPORTED_KEYS.get(name, UNKNOWN_KEY)}")
    for name in ("method", "model"):
        if not isinstance(said.get(name, name), str) or said.get(name) == "":
            raise ConfigError(f"{name!r} must be the name of a {name}")
    if "method" not in said and "model" not in said:
        raise ConfigError("it says neither a 'method' nor a 'model'")
    return ForeignMeaning(
        _proposer_words(said.get("method", "draft_model"), said.get("model")), said.get("num_speculative_tokens")
    )


def _proposer_words(method: str, model: str | None) -> str:
    if method in DRAFT_METHODS:
        if model is None:
            raise ConfigError(f"the method {method!r} needs a 'model'")
        if (problem := draft_model_problem(model)) is not None:
            raise ConfigError(f"'model': {problem}")
        return f"{DRAFT_METHODS[method]}:{model}"
    own_head = MTP_METHOD.fullmatch(method) is not None
    if not own_head and method not in LOOKUP_METHODS:
        raise ConfigError(f"the method {method[:100]!r} is not known; known are {', '.join(SPECULATION_METHODS)}")
    if model is not None:
        raise ConfigError(f"the method {method!r} takes no 'model' of its own: leave it out")
    return "mtp" if own_head else "lookup"


def read_kv_events_config(config: Mapping[str, Any]) -> ForeignMeaning:
    """Raises ConfigError for whatever cannot be honoured, by its name."""
    said = {name: value for name, value in config.items() if value is not None}
    on, publisher = said.pop("enable_kv_cache_events", False), said.pop("publisher", "zmq")
    if not isinstance(on, bool):
        raise ConfigError("'enable_kv_cache_events' must be true or false")
    if publisher not in ("zmq", "null"):
        raise ConfigError(f"the publisher {str(publisher)[:100]!r} is not known; known are zmq and null")
    for name, value in said.items():
        if name not in KV_EVENT_SETTINGS:
            raise ConfigError(f"{name[:100]!r} is not known; known are {', '.join(KV_EVENT_SETTINGS)}")
        if not isinstance(value, str):
            raise ConfigError(f"{name!r} must be text")
    if not on or publisher == "null":
        return ForeignMeaning()
    return ForeignMeaning(
        events={KV_EVENT_SETTINGS[name]: value for name, value in {"endpoint": "tcp://*:5557", **said}.items()}
    )


FOREIGN_SETTINGS: Final[Mapping[str, Setting]] = {known.name: known for known in settings_of(ForeignSettings)}
FOREIGN_MEANINGS: Final[Mapping[str, Callable[[Any], ForeignMeaning]]] = {
    "speculative_config": read_speculative_config,
    "enable_mtp": lambda on: ForeignMeaning("mtp"),
    "suffix_decoding": lambda on: ForeignMeaning("lookup"),
    "draft_model": lambda model: ForeignMeaning(f"draft:{model}"),
    "turbo_kv_bits": lambda bits: ForeignMeaning(codec=f"turbo{bits}"),
    "kv_cache_quantization": lambda on: ForeignMeaning(codec="affine8"),
    "kv_cache_dtype": lambda dtype: ForeignMeaning(live=KV_DTYPES[dtype]),
    "kv_events_config": read_kv_events_config,
    "num_draft_tokens": lambda tokens: ForeignMeaning(tokens=tokens),
    "mtp_num_draft_tokens": lambda tokens: ForeignMeaning(tokens=tokens),
}


def translate_foreign_settings(source: Iterable[GivenSetting]) -> list[GivenSetting]:
    """What one source says, foreign settings put as ours. Raises ConfigError where it says a thing twice."""
    said = list(source)
    own = [given for given in said if given.known.name not in FOREIGN_SETTINGS]
    foreign = [given for given in said if given.known.name in FOREIGN_SETTINGS and given.checked() is not None]
    meant = [(given, FOREIGN_MEANINGS[given.known.name](given.value)) for given in foreign]
    words = [_as_setting("speculate", given, meaning.words) for given, meaning in meant if meaning.words is not None]
    tokens = [
        _as_setting("speculate_tokens", given, meaning.tokens) for given, meaning in meant if meaning.tokens is not None
    ]
    codecs = [_as_setting("cache_codec", given, meaning.codec) for given, meaning in meant if meaning.codec is not None]
    live = [_as_setting("kv_codec", given, meaning.live) for given, meaning in meant if meaning.live is not None]
    events = [_as_setting(name, given, value) for given, meaning in meant for name, value in meaning.events.items()]
    made = [*own, *_join_proposers(words), *tokens, *codecs, *live, *events]
    _refuse_repeated(made)
    return made


def _as_setting(name: str, given: GivenSetting, value: Any) -> GivenSetting:
    return GivenSetting(SETTINGS[name], value, given.origin, given.place)


def _join_proposers(words: Sequence[GivenSetting]) -> list[GivenSetting]:
    """Several proposers may be named by a setting each."""
    if not words:
        return []
    origin, place = (" and ".join(parts) for parts in zip(*((each.origin, each.place) for each in words), strict=True))
    return [GivenSetting(words[0].known, ",".join(each.value for each in words), origin, place)]


def _refuse_repeated(made: Sequence[GivenSetting]) -> None:
    for given in made:
        places = [other.place for other in made if other.known is given.known]
        if len(places) > 1:
            raise ConfigError(f"{' and '.join(places)} say the same thing: give one of them")


OTHER_VARIABLES = frozenset(
    {
        *("INGOT_AS", "INGOT_CONFIG", "INGOT_KERNELS", "INGOT_THREADS", "INGOT_ISA"),
        *("INGOT_CONTROL", "INGOT_WATCH", "INGOT_GROUP_TOKEN", "INGOT_LISTEN", "INGOT_RESTARTS"),
    }
)
"""Variables with our prefix that are no settings: the file's place, the choice of kernels for one process, where a
process stands among several that run one model, and when it was started again."""
KNOWN_SETTINGS: Mapping[str, Setting] = {**SETTINGS, **FOREIGN_SETTINGS}
BOOLEAN_WORDS = {
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


def load_config(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None) -> Config:
    """Settle every value. `flags` holds only what was given, by field name; `file` is what `--config` named.

    Raises ConfigError, naming the flag, variable or key at fault and the nearest known one.
    """
    path = _file_path(environ, file)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(SETTINGS, "default")
    for source in (_from_file(path), _from_variables(environ), _from_flags(flags)):  # the weakest first
        for given in translate_foreign_settings(source):
            values[given.known.name] = given.checked()
            origins[given.known.name] = given.origin
    return Config(Settings(**values), origins, path)


def _from_file(path: Path | None) -> Iterable[GivenSetting]:
    for name, raw in _read_toml(path).items() if path is not None else ():
        known, place = _known_setting(name, f"{path}: unknown key", KNOWN_SETTINGS), f"{path}: {name}"
        yield GivenSetting(known, known.from_toml(raw, place), f"file {path}", place)


def _from_variables(environ: Mapping[str, str]) -> Iterable[GivenSetting]:
    variables = {known.variable: known for known in KNOWN_SETTINGS.values()}
    for name, raw in environ.items():
        if name.startswith(VARIABLE_PREFIX) and name not in OTHER_VARIABLES:
            known = _known_setting(name, "unknown variable", variables, OTHER_VARIABLES)
            yield GivenSetting(known, _from_text(known, raw, name), f"env {name}", name)


def _from_flags(flags: Mapping[str, Any]) -> Iterable[GivenSetting]:
    for name, raw in flags.items():
        known = _known_setting(name, "unknown flag", KNOWN_SETTINGS)
        origin = f"argument {known.positional}" if known.positional else f"flag {known.flag}"
        place = known.positional or known.flag
        yield GivenSetting(known, _from_text(known, raw, place) if isinstance(raw, str) else raw, origin, place)


def _known_setting(name: str, what: str, table: Mapping[str, Setting], also: frozenset[str] = frozenset()) -> Setting:
    if name in table:
        return table[name]
    near = nearest_name(name, [*table, *also])
    raise ConfigError(f"{what} {name}" + (f"; did you mean {near}?" if near else ""))


def _file_path(environ: Mapping[str, str], given: Path | None) -> Path | None:
    if given is not None:
        return given.expanduser()
    if named := environ.get("INGOT_CONFIG"):
        return Path(named).expanduser()
    usual = Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "ingot" / "config.toml"
    return usual if usual.is_file() else None


def _read_toml(path: Path) -> dict[str, Any]:
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
        if text.strip().lower() not in BOOLEAN_WORDS:
            raise ConfigError(f"{place}: {text!r} is neither true nor false")
        return BOOLEAN_WORDS[text.strip().lower()]
    if known.kind in (int, float):
        try:
            return known.kind(text)
        except ValueError:
            wanted = "whole number" if known.kind is int else "number"
            raise ConfigError(f"{place}: {text!r} is not a {wanted}") from None
    if known.kind is tuple:
        return tuple(part for piece in text.split(",") if (part := piece.strip()))
    if known.kind is dict:
        return _parse_object(text, place)
    return Path(text) if known.kind is Path and text else text


def _parse_object(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{place}: {text[:100]!r} is not valid JSON") from None
