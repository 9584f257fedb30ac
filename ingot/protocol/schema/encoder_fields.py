"""Fields whose bounds an encoder sets: its names, its token ids, its dimensions and prompts. Apart from `model_fields`,
as it imports tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ingot.engine.request import PoolingTask
from ingot.protocol.schema.fields import BodyReading, DelegateKind, FieldKind, Int, OneOf, Schema
from ingot.protocol.schema.model_fields import ModelNameField, TokenIdsField
from ingot.protocol.terms import EncoderTerms, Terms, matches_model_name, model_names_schema, unknown_model_error
from ingot.text.tokenizer.encoder_inputs import TextInputs

if TYPE_CHECKING:
    from ingot.engine.pooling_batches import ServedPoolingModel


@dataclass(frozen=True, slots=True)
class EncoderNameField(FieldKind):
    """A name of the encoder for `role`. Any other is a 404 that lists what there is."""

    types, words = (str,), ModelNameField.words
    role: PoolingTask

    def parse(self, value: object, path: str, reading: BodyReading) -> str:
        if not isinstance(value, str):
            raise self.refuse(value, path, reading)
        known = self._terms(reading.terms)
        if not matches_model_name(value, known.models):
            raise unknown_model_error(value, known.models)
        return value

    def schema(self, terms: Terms) -> Schema:
        names = self._terms(terms).models
        return model_names_schema(names) if names else {"type": "string"}

    def _terms(self, terms: Terms) -> EncoderTerms:
        return terms.encoders.get(self.role, EncoderTerms())


@dataclass(frozen=True, slots=True)
class EncoderTokenIdsField(DelegateKind):
    """A list of token ids of the embedding model."""

    most: int

    def parse(self, value: object, path: str, reading: BodyReading) -> tuple[int, ...]:
        return self.kind(reading.terms).parse(value, path, BodyReading(self._terms(reading.terms)))

    def schema(self, terms: Terms) -> Schema:
        return self.kind(terms).schema(self._terms(terms))

    def kind(self, terms: Terms) -> TokenIdsField:
        return TokenIdsField(self.most)

    def _terms(self, terms: Terms) -> Terms:
        known = terms.encoders.get("embedding", EncoderTerms())
        return Terms(known.models, known.vocab, terms.timeout_s, terms.strict)


@dataclass(frozen=True, slots=True)
class DimensionsField(DelegateKind):
    """How many numbers of each vector are wanted: at most as many as the model gives."""

    def kind(self, terms: Terms) -> Int:
        return Int((1, terms.encoders.get("embedding", EncoderTerms()).dimension))


@dataclass(frozen=True, slots=True)
class PromptNameField(FieldKind):
    """One of the prompts that the embedding model's files name."""

    types = (str,)

    def parse(self, value: object, path: str, reading: BodyReading) -> str:
        names = self._names(reading.terms)
        if not names:
            raise self.refuse(value, path, reading)
        return OneOf(names).parse(value, path, reading)

    def schema(self, terms: Terms) -> Schema:
        return OneOf(self._names(terms)).schema(terms) if self._names(terms) else {"enum": [None]}

    def wanted(self, terms: Terms) -> str:
        names = self._names(terms)
        return OneOf(names).wanted(terms) if names else "nothing, as the model's files name no prompts"

    def _names(self, terms: Terms) -> tuple[str, ...]:
        return terms.encoders.get("embedding", EncoderTerms()).prompts


def terms_of_encoder(offered: ServedPoolingModel, names: tuple[str, ...]) -> EncoderTerms:
    """The bounds that an encoder served under `names` sets."""
    card, inputs = offered.card, offered.inputs
    prompts = tuple(inputs.prompts) if isinstance(inputs, TextInputs) else ()
    return EncoderTerms(names, card.vocab, card.dimension, prompts)
