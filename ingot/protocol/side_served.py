"""What the wire knows of served models that do not generate: those for vectors, scores and speech."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ingot.config import Settings
from ingot.engine.encoder_request import EncoderCard
from ingot.engine.model_card import ModelCard
from ingot.engine.speaking.request import SpeakingCard
from ingot.engine.speech_request import HearingCard
from ingot.protocol.model_names import DEFAULT_NAME, check_aliases, with_aliases
from ingot.protocol.schema.encoder_fields import terms_of
from ingot.protocol.schema.fields import BodyReading
from ingot.protocol.terms import EncoderTerms, HearingTerms, SpeakingTerms, Terms

if TYPE_CHECKING:
    from ingot.engine.encoder_request import Role
    from ingot.engine.pooling_batches import OfferedEncoder
    from ingot.engine.text_to_speech import OfferedSpeech


@dataclass(frozen=True, slots=True, kw_only=True)
class SideServed:
    """`card` is that of the model that others stand beside, or of the one that serves alone."""

    card: ModelCard | EncoderCard | HearingCard | SpeakingCard
    terms: Terms
    tenant: str = ""  # to whom; what is remembered of one tenant's requests is no other's
    encoders: Mapping[Role, OfferedEncoder] = field(default_factory=dict)  # for vectors and scores
    hearing: HearingCard | None = None  # of the model that writes down what is spoken
    speaking: OfferedSpeech | None = None  # the model that speaks, and who pronounces for it

    @classmethod
    def alone(
        cls,
        card: EncoderCard | HearingCard | SpeakingCard,
        settings: Settings,
        encoders: Mapping[Role, OfferedEncoder],
        hearing: HearingCard | None,
        speaking: OfferedSpeech | None = None,
    ) -> SideServed:
        """Of a model that serves by itself, under all names that the settings give it. Raises ConfigError."""
        names = settings.served_model_name
        check_aliases(settings.alias, (card.name, *names, DEFAULT_NAME))
        terms = Terms(
            models=_names(card.name, names, settings),
            vocab=1,
            timeout_s=settings.request_timeout_s,
            strict=settings.strict,
            encoders=encoder_terms(encoders, settings, names),
            hearing=hearing_terms(hearing, settings, names),
            speaking=speaking_terms(speaking, settings, names),
            unloads=True,
        )
        return cls(card=card, terms=terms, encoders=encoders, hearing=hearing, speaking=speaking)

    def reading(self) -> BodyReading:
        return BodyReading(self.terms)


def encoder_terms(
    encoders: Mapping[Role, OfferedEncoder], settings: Settings, names: Sequence[str] = ()
) -> dict[str, EncoderTerms]:
    """`names` are further ones, besides its own."""
    return {role: terms_of(one, _names(one.card.name, names, settings)) for role, one in encoders.items()}


def hearing_terms(hearing: HearingCard | None, settings: Settings, names: Sequence[str] = ()) -> HearingTerms:
    if hearing is None:
        return HearingTerms()
    return HearingTerms(_names(hearing.name, names, settings), hearing.languages, hearing.translates)


def speaking_terms(speaking: OfferedSpeech | None, settings: Settings, names: Sequence[str] = ()) -> SpeakingTerms:
    if speaking is None:
        return SpeakingTerms()
    return SpeakingTerms(_names(speaking.card.name, names, settings), speaking.card.voices)


def _names(own: str, further: Sequence[str], settings: Settings) -> tuple[str, ...]:
    return with_aliases(tuple(dict.fromkeys((own, *further, DEFAULT_NAME))), settings.alias)
