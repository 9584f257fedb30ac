"""Which proposers a server uses, as its settings say. Light to import, as settings are checked by it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from ingot.errors import ConfigError, nearest_name

LONE_WORDS: Final = ("auto", "off")
"""Words that stand alone: what the model has, or no speculation."""
PROPOSERS: Final = ("forced", "lookup", "mtp", "draft", "eagle")
MODEL_PROPOSERS: Final = frozenset({"draft", "eagle"})
"""Proposers that are models of their own, which have to be named."""
KNOWN_WORDS: Final = (*LONE_WORDS, *(f"{name}:MODEL" if name in MODEL_PROPOSERS else name for name in PROPOSERS))


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """`names` are the proposers, by preference; empty: no speculation; None: `auto`, whatever there is. `models` are
    those of proposers that are models of their own."""

    names: tuple[str, ...] | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    tokens: int | None = None  # draft tokens of a row, where there are as many; None: as many as pay

    @classmethod
    def parse(cls, text: str, tokens: int | None = None) -> SpeculationOptions:
        """From words joined by commas. Raises ConfigError, which names the words that exist."""
        words = [word.strip() for word in text.split(",")]
        for word in words:
            if word in LONE_WORDS and len(words) > 1:
                raise ConfigError(f"{word!r} stands alone: leave it out, or the others")
        if words == ["auto"]:
            return cls(None, {}, tokens)
        if words == ["off"]:
            return cls((), {}, tokens)
        proposers = [_parse_proposer(word) for word in words]
        names = tuple(name for name, _ in proposers)
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{name!r} is named twice")
        return cls(names, {name: model for name, model in proposers if model}, tokens)

    def refuse_missing(self, offered: Collection[str]) -> None:
        """Raises ConfigError where a proposer is named that the model does not have."""
        for name in self.names or ():
            if name not in offered:
                others = ", ".join(("auto", "off", *offered))
                raise ConfigError(f"speculate: this model has no {name}; what can be asked for: {others}")


def _parse_proposer(word: str) -> tuple[str, str]:
    """Its name and its model, which is empty where it has none."""
    name, _, model = word.partition(":")
    if name not in PROPOSERS:
        near = nearest_name(name, [*LONE_WORDS, *PROPOSERS])
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"{word[:100]!r} is not one of {', '.join(KNOWN_WORDS)}{hint}")
    if name in MODEL_PROPOSERS and not model:
        raise ConfigError(f"{name!r} needs a model: write it like {name}:MODEL")
    if name not in MODEL_PROPOSERS and word != name:
        raise ConfigError(f"{name!r} takes no model of its own: write {name}")
    return name, model
