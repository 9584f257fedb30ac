"""What other servers call things: their flags, variables and values, and what ingot makes of each.

All of it is in `foreign.toml`, which is read when a name is met that is none of ingot's own. A name is put as a setting
of ours, or accepted with a note where ingot always does what it asks for, or refused with what does the same here.
`python -m tools.coming_from` writes docs/coming-from.md.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ingot.errors import ConfigError, nearest_name

TABLE: Final = Path(__file__).with_name("foreign.toml")
VARIABLES: Final = re.compile(r"(OLLAMA|LLAMA|VLLM)_[A-Z_]+")
"""Other servers' variables. They may be meant for another server on this machine, so ours and the file go first."""
Deed = Literal["maps", "always", "refused"]
SERVERS: Final = {
    "vllm": "vLLM",
    "vllm-mlx": "vllm-mlx",
    "rapid-mlx": "Rapid-MLX",
    "mlx-lm": "mlx_lm.server",
    "llama-server": "llama-server",
    "ollama": "Ollama",
}
CLEARLY_NEARER: Final = 0.1
_ON_WORDS: Final = ("", "true", "yes", "on", "1")
_OFF_WORDS: Final = ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class ForeignRow:
    """A row of the table; `foreign.toml` says what its columns are."""

    does: Deed
    names: tuple[str, ...]
    of: tuple[str, ...]
    to: str = ""
    part: str = ""
    takes: Literal["value", "switch", "optional", "many"] = "value"
    form: str = ""
    on: Any = None
    off: Any = None
    refines: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class ForeignName:
    """A name that a user wrote, and its row. `negated`: its `--no-` form."""

    name: str
    row: ForeignRow
    negated: bool = False

    @property
    def takes_value(self) -> bool:
        return self.row.takes in ("value", "many") and not self.negated

    def may_have(self, word: str) -> bool:
        """Whether a word behind a flag that may have a value is one, and not the next argument."""
        known = {*self.row.accept, *_ON_WORDS[1:], *_OFF_WORDS, "auto", *read_table()[1].get(self.row.form, ())}
        return word.lower() in known or (word.isdigit() and not self.row.accept)


def find_foreign(name: str) -> ForeignName | None:
    """The row of a flag or variable."""
    rows = foreign_rows()
    if name in rows:
        return ForeignName(name, rows[name])
    plain = re.sub(r"^(--?)no-", r"\1", name)
    whole = rows.get(name.partition(".")[0])  # vLLM: --compilation-config.mode 3
    if whole is not None and whole.does == "refused":
        return ForeignName(name, whole)
    row = rows.get(plain)
    return ForeignName(name, row, True) if row is not None and plain != name and row.takes != "value" else None


def foreign_rows() -> Mapping[str, ForeignRow]:
    """By every name."""
    return {name: row for row in read_table()[0] for name in row.names}


@functools.cache
def read_table() -> tuple[tuple[ForeignRow, ...], Mapping[str, Mapping[str, str]]]:
    """The rows, and the tables of values: ours by theirs."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    rows = tuple(_read_row(does, row) for does in ("maps", "always", "refused") for row in table[does])
    values = {
        name: {word: ours for words, ours in pairs.items() for word in words.split()}
        for name, pairs in table["values"].items()
    }
    return rows, values


def _read_row(does: Any, row: Mapping[str, Any]) -> ForeignRow:
    columns = {("form" if name == "as" else name): value for name, value in row.items()}
    columns["to"], _, columns["part"] = columns.get("to", "").partition(":")
    lists = {name: tuple(columns.get(name, "").split()) for name in ("names", "of", "refines", "accept")}
    return ForeignRow(does, **{**columns, **lists})


def nearest_known(name: str, own: Iterable[str], spelled: Callable[[str], str] = str) -> str | None:
    """The nearest of our own names, or a flag of other servers, as `spelled`, that is clearly nearer. What switches on
    is no typo of what switches off."""

    def nearest(names: Iterable[str]) -> str | None:
        return nearest_name(name, [other for other in names if switches_off(other) == switches_off(name)])

    ours, theirs = nearest(own), nearest(spelled(flag) for flag in foreign_rows() if flag.startswith("--"))
    if ours is None or theirs is None:
        return ours or theirs
    likeness, theirs_likeness = (difflib.SequenceMatcher(None, each, name).ratio() for each in (ours, theirs))
    return theirs if theirs_likeness > likeness + CLEARLY_NEARER else ours


def switches_off(name: str) -> bool:
    return re.match(r"(--?|INGOT_)?(no|disable)[-_]", name, re.IGNORECASE) is not None


def translated_value(table: str, value: str) -> str | None:
    """What a value of other servers is here, by a table of [values]: `minimax` among tool parsers is `minimax-m2`."""
    return read_table()[1][table].get(value.lower())


def put_as_ours(found: ForeignName, value: Any) -> dict[str, Any]:
    """Settings and their values, by `setting` or `setting:part`; none where there is nothing to set. `value` is text,
    or what a file has, or None for a flag without one. Raises ConfigError for what cannot be honoured."""
    row, text = found.row, _as_text(value)
    if row.does == "refused":
        if found.negated or (row.takes == "switch" and text in _OFF_WORDS):
            return {}
        raise ConfigError(row.note)
    if row.takes == "switch" or (row.takes == "optional" and not text) or found.negated:
        on = _is_on(text) and not found.negated
        if row.does == "always" or (row.off is None and not on):
            if not on:
                raise ConfigError(
                    f"it can only be switched on: {row.note}" if row.note else "it can only be switched on"
                )
            return {}
        return {_target(row): row.on if on else row.off}
    assert text is not None, "the parser asks for a value"
    if row.accept and text.lower() not in row.accept:
        raise ConfigError(f"{text[:100]!r} cannot be honoured: {row.note}")
    ours = _convert(row, text)
    if row.does == "always" or ours is None:
        return {}
    return ours if isinstance(ours, dict) else {_target(row): ours}


def _target(row: ForeignRow) -> str:
    return f"{row.to}:{row.part}" if row.part else row.to


def _as_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return json.dumps(value)


def _is_on(text: str | None) -> bool:
    word = (text or "").strip().lower()
    if word not in (*_ON_WORDS, *_OFF_WORDS):
        raise ConfigError(f"{word[:100]!r} is neither true nor false")
    return word in _ON_WORDS


def _convert(row: ForeignRow, text: str) -> Any:
    """`text` as a value of ours; None to leave the setting as it is."""
    tables = read_table()[1]
    if row.form not in tables:
        return CONVERSIONS[row.form](text) if row.form else text
    table = tables[row.form]
    ours = table.get(text, table.get(text.lower()))
    if ours is None and row.form in NAMED_BY_US:
        return text  # the setting's own check lists what there is
    if ours is None:
        near = nearest_name(text, table)
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"{text[:100]!r} is not known; known are {', '.join(table)}{hint}")
    if ours.startswith("!"):
        raise ConfigError(ours[1:])
    return ours or None


NAMED_BY_US: Final = ("tool_parsers", "reasoning_parsers")
"""Tables of values whose settings take our names, too."""


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text[:100]!r} is not a number") from None


def _count(text: str) -> str | None:
    """A whole number, which may be short, as vLLM has it: 8k is 8,000 and 8K 8,192. Auto, 0 and -1 are the default."""
    if text.strip().lower() in ("auto", "0", "-1", "-2"):
        return None
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([kmgKMG]?)", text.strip())
    if match is None:
        raise ConfigError(f"{text[:100]!r} is not a whole number")
    power = " kmg".index(match[2].lower() or " ")
    scaled = float(match[1]) * (1000 if match[2].islower() else 1024) ** power
    return str(int(scaled)) if scaled.is_integer() else text


def _all_or_count(text: str) -> str | None:
    return None if text.strip() == "-1" else text


def _positive(text: str) -> str | None:
    """0 and less switch it off, which is the default here."""
    return text if _number(text) > 0 else None


def _fraction(text: str) -> str:
    number = _number(text)
    if not 0 < number <= 1:
        raise ConfigError(f"{text[:100]!r} is not a fraction; write it like 0.9")
    return f"{100 * number:.6g}%"


def _mebibytes(text: str) -> str | None:
    if _number(text) == 0:
        raise ConfigError("0 would be no cache; --no-prefix-cache says so")
    return f"{text.strip()}MiB" if _number(text) > 0 else None


def _bytes(text: str) -> str:
    """`4GB`, or a number of bytes."""
    return f"{text.strip()}B" if text.strip().isdigit() else text


def _address(text: str) -> dict[str, str]:
    """Host, host:port or URL, as Ollama reads them."""
    match = re.fullmatch(r"(?:https?://)?(\[[0-9a-fA-F:.]+\]|[^:/\s]*)(?::(\d{1,5}))?/?", text.strip())
    if match is None:
        raise ConfigError(f"{text[:100]!r} is not an address; write it like 127.0.0.1:11434")
    parts = {"host": match[1].strip("[]"), "port": match[2]}
    return {name: part for name, part in parts.items() if part}


def _duration(text: str) -> str | None:
    """Seconds, or Go's `1h30m`. What is negative never ends."""
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", text)
    if not re.fullmatch(r"-?\d+(\.\d+)?|-?(\d+(\.\d+)?(ms|s|m|h))+", text.strip()):
        raise ConfigError(f"{text[:100]!r} is not a duration; write it like 300, 5m or 1h30m")
    if text.strip().startswith("-"):
        return None
    units = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
    return f"{sum(float(number) * units[unit] for number, unit in parts):.6g}"


def _origins(text: str) -> str:
    """A list with commas, or JSON."""
    origins = [str(each).strip() for each in (_parse_list(text) if text.lstrip().startswith("[") else text.split(","))]
    if any("*" in origin for origin in origins):
        raise ConfigError("pages of any origin may not call this server; name those that may: https://chat.example.org")
    return ",".join(origins)


def _parse_list(text: str) -> list[Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise ConfigError(f"{text[:100]!r} is not a list")
    return found


def _hub_id(text: str) -> str:
    if not re.fullmatch(r"[^/\s]+/[^/\s]+", text):
        raise ConfigError(f"{text[:100]!r} is not a hub id; write it like org/name or org/name:Q4_K_M")
    return text


def _one_path(text: str) -> str:
    if "," in text:
        raise ConfigError("one adapter holds for all requests; --lora-modules NAME=PATH serves several under names")
    return text


def _gpu_layers(text: str) -> str:
    if text.strip() == "0":
        raise ConfigError("layers cannot be kept off the device; ingot runs on CPUs only where there is no GPU")
    if not re.fullmatch(r"-?\d+|all|auto", text.strip()):
        raise ConfigError(f"{text[:100]!r} is not a number of layers")
    return text


def _draft(model: str) -> str:
    if (problem := draft_model_problem(model)) is not None:
        raise ConfigError(problem)
    return f"draft:{model}"


def draft_model_problem(model: str) -> str | None:
    return "the name of a draft model must not contain a comma" if "," in model else None


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{text[:100]!r} is not valid JSON") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{text[:100]!r} is not a JSON object")
    return found


LOOKUP_METHODS: Final = frozenset({"ngram", "ngram_gpu", "suffix"})
"""vLLM's methods that find draft tokens in texts."""
DRAFT_METHODS: Final = {"draft_model": "draft", "eagle3": "eagle", "dflash": "draft", "dspark": "draft"}
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


def _read_speculative_config(text: str) -> dict[str, Any]:
    """Our settings for vLLM's. Raises ConfigError, naming the key, for what cannot be honoured."""
    keys = {
        name: value
        for name, value in _json_object(text).items()
        if value is not None and (name, value) not in HARMLESS_VALUES
    }
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
        tokens = settings["speculate_tokens"] = keys["num_speculative_tokens"]
        if type(tokens) is not int:
            raise ConfigError(f"'num_speculative_tokens': {str(tokens)[:100]!r} is not a whole number")
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


def _read_kv_events_config(text: str) -> dict[str, Any]:
    """Our settings for vLLM's. Raises ConfigError, naming the key, for what cannot be honoured."""
    keys = {name: value for name, value in _json_object(text).items() if value is not None}
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


CONVERSIONS: Final[Mapping[str, Callable[[str], Any]]] = {
    "address": _address,
    "bytes": _bytes,
    "count": _count,
    "count_or_all": _all_or_count,
    "draft": _draft,
    "duration": _duration,
    "fraction": _fraction,
    "gigabytes": lambda text: f"{text.strip()}GB" if _number(text) > 0 else None,
    "gpu_layers": _gpu_layers,
    "hub_id": _hub_id,
    "kv_events_config": _read_kv_events_config,
    "mebibytes": _mebibytes,
    "number": lambda text: int(text) if re.fullmatch(r"-?\d{1,9}", text) else _number(text),
    "one_path": _one_path,
    "origins": _origins,
    "positive": _positive,
    "speculative_config": _read_speculative_config,
    "text": lambda text: text,
}
