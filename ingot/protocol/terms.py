"""What bodies are read under: what the served model and the settings add to the bounds that never change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ingot.engine.request import LoraRef


@dataclass(frozen=True, slots=True)
class EncoderTerms:
    """What an encoder that is served besides adds; the defaults hold where there is none."""

    models: tuple[str, ...] = ()
    vocab: int = 1
    dimension: int = 1
    prompts: tuple[str, ...] = ()  # the names of what may stand before a text


@dataclass(frozen=True, slots=True)
class HearingTerms:
    """What a model that hears and is served besides adds; the defaults hold where there is none."""

    models: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()  # by code
    translates: bool = False


@dataclass(frozen=True, slots=True)
class SpeakingTerms:
    """What a model that speaks and is served besides adds; the defaults hold where there is none."""

    models: tuple[str, ...] = ()
    voices: tuple[str, ...] = ()


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
    loras: Mapping[str, LoraRef] = field(default_factory=dict, hash=False)  # adapters, by name
    default_lora: str | None = None  # the one of requests that name none
    hearing: HearingTerms = HearingTerms()
    speaking: SpeakingTerms = SpeakingTerms()

    unloads: bool = False  # the model may be unloaded, and requests may say when

    @property
    def every_model(self) -> tuple[str, ...]:
        """All names, whatever the models are for."""
        further = (name for encoder in self.encoders.values() for name in encoder.models)
        return tuple(dict.fromkeys((*self.models, *self.loras, *further, *self.hearing.models, *self.speaking.models)))


NO_TERMS: Final = Terms((), 1, 1.0)
