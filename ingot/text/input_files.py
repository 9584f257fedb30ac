"""A file of prompts: JSON (a list), JSON Lines (one a line), or plain text, which is one prompt as it stands.

A prompt is a string, a list of messages, or an object with either under `messages` or `prompt` and whatever else a
request may have. What each may hold is judged where it is rendered; here is only the shape.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.errors import ConfigError

LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """`place` names it in an error: the file and the line, or the number in the list."""

    place: str
    value: str | list[Any] | dict[str, Any]


def read_prompts(path: Path) -> tuple[FilePrompt, ...]:
    """Raises ConfigError that names the line at fault."""
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    if path.suffix in LINES:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
        found = [FilePrompt(f"{path}, line {number}", _decoded(line, path, number)) for number, line in lines]
    elif path.suffix == ".json":
        whole = _decoded(text, path)
        items = whole if isinstance(whole, list) else [whole]
        found = [FilePrompt(f"{path}, prompt {number}", item) for number, item in enumerate(items, start=1)]
    else:
        found = [FilePrompt(str(path), text)] if text.strip() else []
    if not found:
        raise ConfigError(f"{path} holds no prompt")
    for prompt in found:
        _check(prompt)
    return tuple(found)


def prompt_file_problem(path: Path) -> str | None:
    try:
        read_prompts(path)
    except ConfigError as error:
        return error.message
    return None


def _decoded(text: str, path: Path, line: int | None = None) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ConfigError(f"{path} is nested too deep") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {line or error.lineno}: not valid JSON: {error.msg}") from None


def _check(prompt: FilePrompt) -> None:
    value = prompt.value
    if isinstance(value, dict) and ("messages" in value) == ("prompt" in value):
        raise ConfigError(f"{prompt.place}: an object has either 'messages' or 'prompt'")
    if isinstance(value, list) and not all(isinstance(message, dict) for message in value):
        raise ConfigError(f"{prompt.place}: a list holds messages, which are objects")
    if not isinstance(value, str | list | dict) or not value:
        raise ConfigError(f"{prompt.place}: a prompt is a text, a list of messages, or an object")
