"""What a chat in the terminal is about: the messages so far, the system prompt, how to sample."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.errors import ConfigError, nearest

Message = dict[str, str]

# The server knows the bounds; here only the type is settled.
SAMPLING: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
}


def sampling_value(name: str, text: str) -> int | float:
    """Raises ConfigError for an unknown name or a value of the wrong type."""
    if name not in SAMPLING:
        near = nearest(name, SAMPLING)
        raise ConfigError(f"unknown parameter {name}; " + (f"did you mean {near}?" if near else ", ".join(SAMPLING)))
    try:
        value = SAMPLING[name](text)
    except ValueError:
        wanted = "whole number" if SAMPLING[name] is int else "number"
        raise ConfigError(f"{name}: {text!r} is not a {wanted}") from None
    if not math.isfinite(value):
        raise ConfigError(f"{name}: {text} is not a finite number")
    return value


@dataclass
class ChatSession:
    """Answered turns alternate between user and assistant; a question without an answer is not kept, but
    `asked` remembers it, so that it can be asked again."""

    model: str
    system: str | None = None
    sampling: dict[str, int | float] = field(default_factory=dict)
    turns: list[Message] = field(default_factory=list)
    asked: str | None = None
    kept: bool = False  # whether `asked` and its answer are the last turn

    def ask(self, text: str) -> dict[str, Any]:
        """The body of the request that asks `text`."""
        self.asked, self.kept = text, False
        messages = [*self.messages, {"role": "user", "content": text}]
        return {"model": self.model, "messages": messages, "stream": True, **self.sampling}

    def answered(self, text: str) -> None:
        """Keep the last question with its answer, which may be a part of one."""
        if self.asked is None:
            raise ValueError("nothing was asked")
        self.turns += [{"role": "user", "content": self.asked}, {"role": "assistant", "content": text}]
        self.kept = True

    def retry(self) -> str | None:
        """Forget the last answer; what had been asked, or None if nothing was."""
        if self.kept:
            del self.turns[-2:]
        self.kept = False
        return self.asked

    def clear(self) -> None:
        self.turns, self.asked, self.kept = [], None, False

    @property
    def messages(self) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def save(self, path: Path) -> None:
        """As JSON when the name ends so, else as Markdown. Raises FileExistsError rather than overwrite."""
        with path.open("x", encoding="utf-8") as file:
            file.write(self._json() if path.suffix == ".json" else self._markdown())

    def _json(self) -> str:
        whole = {"model": self.model, "messages": self.messages, "sampling": self.sampling}
        return json.dumps(whole, ensure_ascii=False, indent=2) + "\n"

    def _markdown(self) -> str:
        return "\n".join(f"## {message['role']}\n\n{message['content']}\n" for message in self.messages)
