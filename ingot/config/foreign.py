"""Settings that other servers know by other names. Each is read as what it means here, wherever it stands: a flag, a
variable or the file."""

# ruff: noqa: RUF009  (`setting` is dataclasses.field with a help text in its metadata)
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ingot.config.field import Given, Setting, setting, settings_of
from ingot.config.settings import SETTINGS
from ingot.errors import ConfigError

LOOKUPS: Final = frozenset({"ngram", "ngram_gpu", "suffix"})
"""vLLM's methods that find guesses in texts."""
OF_ANOTHER: Final = {"draft_model": "draft", "eagle3": "eagle"}
"""Its methods that take a model of their own, and what we call them."""
OF_THE_MODEL: Final = re.compile(r"(\w+_)?mtp", re.ASCII)
"""Its methods whose head is part of the model: one for each family, which all mean that family's."""
METHODS: Final = ("mtp", "ngram", "suffix", *OF_ANOTHER)
"""The ones that an error names."""
KEYS: Final = ("method", "model", "num_speculative_tokens")
NOT_KNOWN: Final = f"is not known; known are {', '.join(KEYS)}"
UNHEEDED: Final = {
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
HARMLESS: Final = (("draft_tensor_parallel_size", 1),)
"""What asks for nothing."""

EVENTS: Final = {"endpoint": "kv_events", "replay_endpoint": "kv_events_replay", "topic": "kv_events_topic"}
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
class Meaning:
    """What a foreign setting says: who guesses ahead, as `speculate` takes it, and how many tokens; what kept prefixes
    are put into; what live keys and values are; or where events are told."""

    words: str | None = None
    tokens: Any = None
    codec: str | None = None
    live: str | None = None
    events: Mapping[str, str] = field(default_factory=dict)  # by our setting's name


def on_problem(on: bool) -> str | None:
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


def model_problem(model: str) -> str | None:
    return "a name with a comma cannot be told from several" if "," in model else None


def vllm_problem(config: dict[str, Any]) -> str | None:
    try:
        from_vllm(config)
    except ConfigError as error:
        return error.message
    return None


def events_problem(config: dict[str, Any]) -> str | None:
    try:
        from_events(config)
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
        check=vllm_problem,
    )
    enable_mtp: bool = setting(False, "the same as --speculate mtp", check=on_problem)
    suffix_decoding: bool = setting(False, "the same as --speculate lookup", check=on_problem)
    draft_model: str | None = setting(None, "the same as --speculate draft:MODEL", check=model_problem)
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


def from_vllm(config: Mapping[str, Any]) -> Meaning:
    """Raises ConfigError for whatever cannot be honoured, by its name."""
    said = {name: value for name, value in config.items() if value is not None and (name, value) not in HARMLESS}
    for name in said:
        if name not in KEYS:
            raise ConfigError(f"{name[:100]!r} {UNHEEDED.get(name, NOT_KNOWN)}")
    for name in ("method", "model"):
        if not isinstance(said.get(name, name), str) or said.get(name) == "":
            raise ConfigError(f"{name!r} must be the name of a {name}")
    if "method" not in said and "model" not in said:
        raise ConfigError("it says neither a 'method' nor a 'model'")
    return Meaning(_words(said.get("method", "draft_model"), said.get("model")), said.get("num_speculative_tokens"))


def _words(method: str, model: str | None) -> str:
    if method in OF_ANOTHER:
        if model is None:
            raise ConfigError(f"the method {method!r} needs a 'model'")
        if (problem := model_problem(model)) is not None:
            raise ConfigError(f"'model': {problem}")
        return f"{OF_ANOTHER[method]}:{model}"
    own_head = OF_THE_MODEL.fullmatch(method) is not None
    if not own_head and method not in LOOKUPS:
        raise ConfigError(f"the method {method[:100]!r} is not known; known are {', '.join(METHODS)}")
    if model is not None:
        raise ConfigError(f"the method {method!r} takes no 'model' of its own: leave it out")
    return "mtp" if own_head else "lookup"


def from_events(config: Mapping[str, Any]) -> Meaning:
    """Raises ConfigError for whatever cannot be honoured, by its name."""
    said = {name: value for name, value in config.items() if value is not None}
    on, publisher = said.pop("enable_kv_cache_events", False), said.pop("publisher", "zmq")
    if not isinstance(on, bool):
        raise ConfigError("'enable_kv_cache_events' must be true or false")
    if publisher not in ("zmq", "null"):
        raise ConfigError(f"the publisher {str(publisher)[:100]!r} is not known; known are zmq and null")
    for name, value in said.items():
        if name not in EVENTS:
            raise ConfigError(f"{name[:100]!r} is not known; known are {', '.join(EVENTS)}")
        if not isinstance(value, str):
            raise ConfigError(f"{name!r} must be text")
    if not on or publisher == "null":
        return Meaning()
    return Meaning(events={EVENTS[name]: value for name, value in {"endpoint": "tcp://*:5557", **said}.items()})


FOREIGN: Final[Mapping[str, Setting]] = {known.name: known for known in settings_of(ForeignSettings)}
MEANINGS: Final[Mapping[str, Callable[[Any], Meaning]]] = {
    "speculative_config": from_vllm,
    "enable_mtp": lambda on: Meaning("mtp"),
    "suffix_decoding": lambda on: Meaning("lookup"),
    "draft_model": lambda model: Meaning(f"draft:{model}"),
    "turbo_kv_bits": lambda bits: Meaning(codec=f"turbo{bits}"),
    "kv_cache_quantization": lambda on: Meaning(codec="affine8"),
    "kv_cache_dtype": lambda dtype: Meaning(live=KV_DTYPES[dtype]),
    "kv_events_config": from_events,
    "num_draft_tokens": lambda tokens: Meaning(tokens=tokens),
    "mtp_num_draft_tokens": lambda tokens: Meaning(tokens=tokens),
}


def in_our_words(source: Iterable[Given]) -> list[Given]:
    """What one source says, foreign settings put as ours. Raises ConfigError where it says a thing twice."""
    said = list(source)
    own = [given for given in said if given.known.name not in FOREIGN]
    foreign = [given for given in said if given.known.name in FOREIGN and given.checked() is not None]
    meant = [(given, MEANINGS[given.known.name](given.value)) for given in foreign]
    words = [_as("speculate", given, meaning.words) for given, meaning in meant if meaning.words is not None]
    tokens = [_as("speculate_tokens", given, meaning.tokens) for given, meaning in meant if meaning.tokens is not None]
    codecs = [_as("cache_codec", given, meaning.codec) for given, meaning in meant if meaning.codec is not None]
    live = [_as("kv_codec", given, meaning.live) for given, meaning in meant if meaning.live is not None]
    events = [_as(name, given, value) for given, meaning in meant for name, value in meaning.events.items()]
    made = [*own, *_joined(words), *tokens, *codecs, *live, *events]
    _refuse_twice(made)
    return made


def _as(name: str, given: Given, value: Any) -> Given:
    return Given(SETTINGS[name], value, given.origin, given.place)


def _joined(words: Sequence[Given]) -> list[Given]:
    """Several proposers may be named by a setting each."""
    if not words:
        return []
    origin, place = (" and ".join(parts) for parts in zip(*((each.origin, each.place) for each in words), strict=True))
    return [Given(words[0].known, ",".join(each.value for each in words), origin, place)]


def _refuse_twice(made: Sequence[Given]) -> None:
    for given in made:
        places = [other.place for other in made if other.known is given.known]
        if len(places) > 1:
            raise ConfigError(f"{' and '.join(places)} say the same thing: give one of them")
