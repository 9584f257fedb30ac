"""The nouns: a model behind an address, a client that can be pointed at it, and how it is configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

CLIENT_TIMEOUT_S: Final = 3600
"""How long a client is to wait for an answer, as long as the server works on one. Prompts of agents are long, and
where only a CPU computes them, the first takes minutes."""
NO_KEY: Final = "unneeded"  # the key for clients that insist on one, when the server needs none
LONGEST_ANSWER: Final = 32_000


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A served model. `url` is the server's root, `context` all that a prompt and its answer may take together."""

    url: str
    key: str | None
    model: str
    context: int

    @property
    def api(self) -> str:
        return f"{self.url}/v1"

    @property
    def secret(self) -> str:
        return self.key or NO_KEY

    @property
    def answer(self) -> int:
        """Tokens to keep free for an answer."""
        return min(self.context // 4, LONGEST_ANSWER)

    @property
    def prompt(self) -> int:
        """Tokens that a conversation may take before it has to be made shorter."""
        return self.context - self.answer


@dataclass(frozen=True, slots=True)
class ClientStart:
    """One run of a client. `files` lie in a folder that is gone after it; `without` is left out of its environment."""

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConfigSnippet:
    """A text for the user to put into a file or a shell, and the language it is in."""

    place: str
    language: str
    text: str


@dataclass(frozen=True, slots=True)
class Agent:
    """`launch` makes the command that starts it, with a folder for its files; `snippets` are for starting it by hand.

    `first_prompt` is about how many tokens its first prompt has, before the user has written anything.
    """

    name: str
    title: str
    program: str
    install: str
    first_prompt: int
    launch: Callable[[Endpoint, Path], ClientStart]
    snippets: Callable[[Endpoint], tuple[ConfigSnippet, ...]]

    def warning(self, endpoint: Endpoint) -> str | None:
        """What to say of a context in which there is little room to work."""
        if endpoint.prompt >= 2 * self.first_prompt:
            return None
        return (
            f"{self.title} begins with about {self.first_prompt} tokens, and {endpoint.model} has a context of "
            f"{endpoint.context}: there is little room to work; `ingot serve --context N` makes it longer where the "
            "model allows it"
        )
