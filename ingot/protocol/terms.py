"""The terms under which bodies are parsed: the bounds that depend on the served models and the settings, and the names
of the models.

A name is plain, or a pattern in which `*` matches any text. Light to import: the HTTP edge and the settings' checks
need it before any model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from ingot.errors import ConfigError, ModelNotFound

if TYPE_CHECKING:
    from ingot.engine.request import LoraRef


@dataclass(frozen=True, slots=True)
class TaskTerms:
    """The terms of a model that does not generate; the defaults are for a server without one."""

    models: tuple[str, ...] = ()
    vocab: int = 1
    dimension: int = 1  # of an embedding
    prompts: tuple[str, ...] = ()  # the names of its prompts, which may come before a text
    languages: tuple[str, ...] = ()  # of speech, by code
    translates: bool = False
    voices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MediaTerms:
    """The media that the served model takes; the defaults are for a text-only model."""

    kinds: tuple[str, ...] = ()  # "image", "video"
    hosts: tuple[str, ...] = ()  # from which files may be fetched
    withheld: bool = False  # its vision encoder is disabled by the settings


@dataclass(frozen=True, slots=True)
class Terms:
    models: tuple[str, ...]
    vocab: int
    timeout_s: float
    strict: bool = False
    template_variables: tuple[str, ...] = ()  # of the chat template, which a request may set
    proposers: tuple[str, ...] = ()  # of draft tokens, by name
    media: MediaTerms = MediaTerms()
    tasks: Mapping[str, TaskTerms] = field(default_factory=dict, hash=False)  # of models that do not generate, by kind
    loras: Mapping[str, LoraRef] = field(default_factory=dict, hash=False)  # adapters, by name
    default_lora: str | None = None  # for requests that name none
    unloads: bool = False  # the model may be unloaded, and requests may set when

    @property
    def all_model_names(self) -> tuple[str, ...]:
        """The names of all kinds of models."""
        further = (name for task in self.tasks.values() for name in task.models)
        return tuple(dict.fromkeys((*self.models, *self.loras, *further)))

    def task(self, kind: str) -> TaskTerms:
        return self.tasks.get(kind, NO_TASK)


NO_TASK: Final = TaskTerms()
NO_TERMS: Final = Terms((), 1, 1.0)
ANY_TEXT = "*"
DEFAULT_NAME = "default"
"""The name of the served model, or of the first one."""


def matches_model_name(name: str, names: Iterable[str]) -> bool:
    """Whether `name` is among `names`, or matches a pattern that is."""
    return any(name == known or (ANY_TEXT in known and _name_pattern(known).fullmatch(name)) for known in names)


def model_names_schema(names: Sequence[str]) -> dict[str, Any]:
    """The JSON schema of the names that `matches_model_name` accepts."""
    if not any(ANY_TEXT in name for name in names):
        return {"type": "string", "enum": list(names)}
    return {"type": "string", "pattern": f"^(?:{'|'.join(_quoted_name(name) for name in names)})$"}


def with_alias_names(names: Sequence[str], aliases: Iterable[str]) -> tuple[str, ...]:
    """`names`, with the aliases (`name=target`) whose target is one of them."""
    pairs = [alias.partition("=") for alias in aliases]
    return tuple(dict.fromkeys([*names, *(alias for alias, _, target in pairs if target in names)]))


def check_aliases(aliases: Iterable[str], names: Iterable[str]) -> None:
    """Raises ConfigError for an alias of an unknown model. An alias of an alias is not allowed."""
    known = tuple(dict.fromkeys(names))
    for alias in aliases:
        target = alias.partition("=")[2]
        if target not in known:
            listed = ", ".join(known)
            raise ConfigError(f"alias {alias}: there is no model {target!r}; served: {listed}", param="alias")


def unknown_model_error(name: str, known: Iterable[str]) -> ModelNotFound:
    served = ", ".join(f"'{one}'" for one in known)
    return ModelNotFound(f"There is no model '{name[:200]}' here. Served: {served}.", param="model")


def _quoted_name(name: str) -> str:
    # Only what has a meaning is escaped: JSON Schema's expressions allow no other.
    return ".*".join(re.sub(r"[][^$\\.+?(){}|]", r"\\\g<0>", part) for part in name.split(ANY_TEXT))


@lru_cache(maxsize=256)
def _name_pattern(name: str) -> re.Pattern[str]:
    return re.compile(_quoted_name(name))
