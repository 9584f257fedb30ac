"""What bodies are read under: what the served model and the settings add to the bounds that never change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class EncoderTerms:
    """What an encoder that is served besides adds; the defaults hold where there is none."""

    models: tuple[str, ...] = ()
    vocab: int = 1
    dimension: int = 1
    prompts: tuple[str, ...] = ()  # the names of what may stand before a text


@dataclass(frozen=True, slots=True)
class MediaTerms:
    """What the served model may be shown beside text; the defaults hold for one that reads text alone."""

    kinds: tuple[str, ...] = ()  # "image", "video"
    hosts: tuple[str, ...] = ()  # that files may be fetched from
    withheld: bool = False  # it has a vision tower, which the settings leave out


@dataclass(frozen=True, slots=True)
class Terms:
    models: tuple[str, ...]
    vocab: int
    timeout_s: float
    strict: bool = False
    template_variables: tuple[str, ...] = ()  # what a request may tell the chat template
    proposers: tuple[str, ...] = ()  # who can guess ahead, by name
    media: MediaTerms = MediaTerms()
    encoders: Mapping[str, EncoderTerms] = field(default_factory=dict, hash=False)  # by role

    @property
    def every_model(self) -> tuple[str, ...]:
        """All names, whatever the models are for."""
        further = (name for encoder in self.encoders.values() for name in encoder.models)
        return tuple(dict.fromkeys((*self.models, *further)))


NO_TERMS: Final = Terms((), 1, 1.0)
