"""`ingot replay FILE`: run a request again that a server captured (`--capture`), and show where the answers differ.

The model is loaded with the captured settings, and answers are compared token by token; vectors and scores number by
number, with a tolerance for rounding. With `--url` another server is asked, and texts are compared.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ingot.cli.client import ServerClient
from ingot.cli.flags import CommandParser, add_settings, settings_from_arguments
from ingot.config import SETTINGS, Config, Settings
from ingot.errors import ConfigError, IngotError
from ingot.quantities import counted

ABOUT_REPLAY = "Run a captured request again, here or on another server, and show where the answers differ."
REPLAY_VERSION: Final = 1
ROUNDING_TOLERANCE: Final = 1e-3  # relative to a vector's largest number
SHOWN_CHARS: Final = 60  # of each text, from where they differ
JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerDifference:
    """Where two answers differ, and what each has from there on."""

    answer: int
    position: str
    before: str
    after: str

    def __str__(self) -> str:
        before, after = f"  captured: {self.before}", f"  now:      {self.after}"
        return f"answer {self.answer} differs from {self.position} on:\n{before}\n{after}"


def run_replay(arguments: list[str]) -> int:
    parser = CommandParser("replay", ABOUT_REPLAY)
    parser.add_argument("file", metavar="FILE", type=Path, help="a file of a server's --capture folder")
    parser.add_argument("model", metavar="MODEL", nargs="?", help="use this model instead of the captured one")
    parser.flag("--url", metavar="URL", help="ask this server instead of loading the model")
    parser.flag("--api-key", metavar="KEY", dest="api_key", help="the server's key (better: INGOT_API_KEY)")
    add_settings(parser, ("the model", "the engine", "the rest"))
    flags = parser.parse(arguments)
    record = read_capture(flags.file)
    config = settings_from_arguments(flags)
    if (url := vars(flags).get("url")) is not None:
        texts = answer_texts(record["path"], _ask_again(ServerClient(url, config.settings.api_key), record))
        return _print_differences(
            record, [text_difference(number, *pair) for number, pair in enumerate(_paired_answers(record, texts))]
        )
    again = replay_locally(record, with_captured_settings(config, record))
    for note in replay_notes(record, again):
        print(f"note: {note}")
    return _print_differences(record, answer_differences(record, again))


def read_capture(path: Path) -> JsonObject:
    """Raises ConfigError unless the file is a captured request that can be run again."""
    try:
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        raise ConfigError(f"{path} is not JSON") from None
    if not isinstance(record, dict) or record.get("version") != REPLAY_VERSION or "body" not in record:
        raise ConfigError(f"{path} is not a request that this version of ingot captured")
    if "error" in record:
        raise ConfigError(f"{path}: the request failed, so there is no answer to compare: {record['error']['message']}")
    return record


def replayed_body(record: JsonObject) -> dict[str, Any]:
    """The body for the same answer: not streamed, with the seed that was used, and with what a policy of the server
    decided then (`--specprefill auto`)."""
    if is_encoding_capture(record):
        return dict(record["body"])
    body, fields = dict(record["body"]) | {"stream": False}, {"seed": record["seed"]}
    options = (body.get("options") or {}) if record["path"].startswith("/api/") else body
    asks = any(options.get(name) is not None for name in ("specprefill", "specprefill_keep_pct"))
    if record["settings"].get("specprefill") == "auto" and not asks and options.get("cache") != "exact":
        fields["specprefill"] = record.get("thinned_out", False)
    return body | ({"options": {**options, **fields}} if options is not body else fields)


def with_captured_settings(config: Config, record: JsonObject) -> Settings:
    """The captured settings, except for those that are set now."""
    captured = {
        name: _setting_value(name, value)
        for name, value in record["settings"].items()
        if name in SETTINGS and config.origins[name] == "default"
    }
    return replace(config.settings, **captured)


def _setting_value(name: str, value: Any) -> Any:
    kind = SETTINGS[name].kind
    return kind(value) if kind in (tuple, Path) else value


def replay_locally(record: JsonObject, settings: Settings) -> JsonObject:
    """The record of the same request, captured in this process."""
    from ingot.cli.serve import local_server

    with tempfile.TemporaryDirectory(prefix="ingot-replay-") as folder:
        private = replace(settings, capture=Path(folder), capture_requests="all", responses_store="off")
        with local_server(private, encoders=is_encoding_capture(record)) as url:
            _ask_again(ServerClient(url, settings.api_key), record)
        [path] = Path(folder).glob("*.json")  # the server has stopped, so it is written
        return read_capture(path)


def _ask_again(client: ServerClient, record: JsonObject) -> Any:
    return client.post(record["path"], replayed_body(record))


def replay_notes(record: JsonObject, again: JsonObject) -> list[str]:
    """Other differences: the model, and the prompt's tokens."""
    notes = []
    if record["fingerprint"] != again["fingerprint"]:
        notes.append(f"the model is different: {record['model']['name']} then, {again['model']['name']} now")
    if record["prompts"] != again["prompts"]:
        notes.append("the prompt has different tokens: its rendering or encoding has changed")
    return notes


def answer_differences(record: JsonObject, again: JsonObject) -> list[AnswerDifference | None]:
    difference = number_difference if is_encoding_capture(record) else token_difference
    return [difference(number, *pair) for number, pair in enumerate(_paired_answers(record, again["answers"]))]


def is_encoding_capture(record: JsonObject) -> bool:
    """Whether the answers are vectors or scores."""
    return any("numbers" in answer for answer in record["answers"])


def number_difference(number: int, before: JsonObject, after: JsonObject) -> AnswerDifference | None:
    """The first number that differs by more than rounding in another batch explains."""
    pairs = list(zip(before["numbers"], after["numbers"], strict=True))
    tolerance = ROUNDING_TOLERANCE * max((abs(one) for one, _ in pairs), default=0.0)
    first = next((index for index, (one, other) in enumerate(pairs) if abs(one - other) > tolerance), None)
    if first is None:
        return None
    return AnswerDifference(number, f"number {first} of {len(pairs)}", *(f"{value:.6g}" for value in pairs[first]))


def token_difference(number: int, before: JsonObject, after: JsonObject) -> AnswerDifference | None:
    if before["tokens"] == after["tokens"]:
        return None
    position = f"token {_shared_length(before['tokens'], after['tokens'])} of {len(before['tokens'])}"
    shared = _shared_length(before["text"], after["text"])
    return AnswerDifference(number, position, _text_from(before["text"], shared), _text_from(after["text"], shared))


def text_difference(number: int, before: JsonObject, after: str) -> AnswerDifference | None:
    shared = _shared_length(before["text"], after)
    if before["text"] == after:
        return None
    position = f"character {shared} of {len(before['text'])}"
    return AnswerDifference(number, position, _text_from(before["text"], shared), _text_from(after, shared))


def _shared_length(before: Sequence[Any], after: Sequence[Any]) -> int:
    """The length of the common prefix."""
    unlike = (index for index, (one, other) in enumerate(zip(before, after, strict=False)) if one != other)
    return next(unlike, min(len(before), len(after)))


def _text_from(text: str, begin: int) -> str:
    return repr(text[begin : begin + SHOWN_CHARS]) if begin < len(text) else "(the end)"


def _paired_answers(record: JsonObject, others: Sequence[Any]) -> list[tuple[JsonObject, Any]]:
    if len(record["answers"]) != len(others):
        raise IngotError(f"{counted(len(record['answers']), 'answer')} captured, but now there are {len(others)}")
    return list(zip(record["answers"], others, strict=True))


def answer_texts(path: str, answer: Any) -> list[str]:
    """The texts in a response of the protocol that `path` belongs to."""
    match path:
        case "/v1/chat/completions":
            return [choice["message"].get("content") or "" for choice in answer["choices"]]
        case "/v1/completions":
            return [choice["text"] for choice in answer["choices"]]
        case "/v1/messages":
            return ["".join(block["text"] for block in answer["content"] if block["type"] == "text")]
        case "/v1/responses":
            parts = [part for item in answer["output"] if item["type"] == "message" for part in item["content"]]
            return ["".join(part.get("text", "") for part in parts)]
        case "/api/chat":
            return [answer["message"]["content"]]
        case "/api/generate":
            return [answer["response"]]
    raise ConfigError(f"requests to {path} cannot be compared with those of another server: leave out --url")


def _print_differences(record: JsonObject, found: Sequence[AnswerDifference | None]) -> int:
    differences = [each for each in found if each is not None]
    for difference in differences:
        print(difference)
    if not differences:
        unit = "numbers" if is_encoding_capture(record) else "tokens"
        count = sum(len(answer[unit]) for answer in record["answers"])
        print(f"the same: {counted(len(record['answers']), 'answer')}, {count} {unit}")
    return 1 if differences else 0
