"""Files that a server reads besides weights and its own settings. Light: settings are checked with it.

A model folder's JSON files (`read_json_object`); `generation_config.json`, in which a model's makers recommend how to
generate with it; and files of prompts.

A file of prompts is JSON (a list), JSON Lines (one a line), or plain text, which is one prompt as it stands. A prompt
is a string, a list of messages, or an object with either under `messages` or `prompt` and whatever else a request may
have. What each may hold is judged where it is rendered; here is only the shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ingot.errors import ConfigError, ModelError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a file holds; an empty one where there is no file. Raises ModelError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} does not hold a JSON object.")
    return value


GENERATION_CONFIG_FILE: Final = "generation_config.json"
NO_GENERATION_CONFIG: Final = ("none", "vllm")
"""Settings that follow no such file. To vLLM, its own name means its own defaults, which change nothing either."""


SANE_SAMPLING: Final[Mapping[str, float]] = {"temperature": 0.7, "top_p": 0.95}
"""The sampling of models whose makers state none: small ones drift when sampled from their plain distribution."""
STATES_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "do_sample")
"""A file with one of these says how to sample; `do_sample` alone asks for the plain distribution, or for none."""


def read_generation_config(setting: str, model: Path, elsewhere: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The file that the setting names: the model's own for `auto`, none, or that of another folder. What the model's
    makers recommend `elsewhere` completes its own; where they state no sampling at all, ours does."""
    if setting in NO_GENERATION_CONFIG:
        return {}
    if setting == "auto":
        stated = {**(elsewhere or {}), **read_json_object(model / GENERATION_CONFIG_FILE)}
        return stated if states_sampling(model, elsewhere) else {**stated, **SANE_SAMPLING}
    return read_json_object(Path(setting).expanduser() / GENERATION_CONFIG_FILE)


def states_sampling(model: Path, elsewhere: Mapping[str, Any] | None = None) -> bool:
    """Whether the model's makers say how to sample, in its own file or `elsewhere`."""
    stated = {**(elsewhere or {}), **read_json_object(model / GENERATION_CONFIG_FILE)}
    return any(stated.get(name) is not None for name in STATES_SAMPLING)


def generation_config_problem(setting: str) -> str | None:
    if (
        setting == "auto"
        or setting in NO_GENERATION_CONFIG
        or (Path(setting).expanduser() / GENERATION_CONFIG_FILE).is_file()
    ):
        return None
    return f"{setting!r} is neither auto nor none, nor a folder that holds a {GENERATION_CONFIG_FILE}"


JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """`place` is its position in errors: the file and the line, or the number in the list."""

    place: str
    value: str | list[Any] | dict[str, Any]


def read_text_file(path: Path) -> str:
    """A file that a user named. Raises ConfigError."""
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        raise ConfigError(f"{path} is not UTF-8 text") from None


def read_prompts(path: Path) -> tuple[FilePrompt, ...]:
    """Raises ConfigError that names the line at fault."""
    text = read_text_file(path)
    if path.suffix in JSON_LINES_SUFFIXES:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
        found = [
            FilePrompt(f"{path}, line {number}", _decode_prompt_json(line, path, number)) for number, line in lines
        ]
    elif path.suffix == ".json":
        whole = _decode_prompt_json(text, path)
        items = whole if isinstance(whole, list) else [whole]
        found = [FilePrompt(f"{path}, prompt {number}", item) for number, item in enumerate(items, start=1)]
    else:
        found = [FilePrompt(str(path), text)] if text.strip() else []
    if not found:
        raise ConfigError(f"{path} holds no prompt")
    for prompt in found:
        _check_file_prompt(prompt)
    return tuple(found)


def _decode_prompt_json(text: str, path: Path, line: int | None = None) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ConfigError(f"{path} is nested too deep") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {line or error.lineno}: not valid JSON: {error.msg}") from None


def _check_file_prompt(prompt: FilePrompt) -> None:
    value = prompt.value
    if isinstance(value, dict) and ("messages" in value) == ("prompt" in value):
        raise ConfigError(f"{prompt.place}: an object has either 'messages' or 'prompt'")
    if isinstance(value, list) and not all(isinstance(message, dict) for message in value):
        raise ConfigError(f"{prompt.place}: a list holds messages, which are objects")
    if not isinstance(value, str | list | dict) or not value:
        raise ConfigError(f"{prompt.place}: a prompt is a text, a list of messages, or an object")
