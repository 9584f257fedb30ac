"""Fields that depend on an encoder: its names, token ids, dimensions and prompts. Not in `model_fields`, as it imports
tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ingot.engine.request import PoolingTask
from ingot.protocol.schema.fields import BodyReading, DelegateKind, FieldKind, Int, OneOf, Schema
from ingot.protocol.schema.model_fields import ModelNameField, TokenIdsField
from ingot.protocol.terms import EncoderTerms, Terms, model_names_schema
from ingot.text.tokenizer.encoder_inputs import TextInputs

if TYPE_CHECKING:
    from ingot.engine.pooling_batches import ServedPoolingModel


@dataclass(frozen=True, slots=True)
class EncoderNameField(ModelNameField):
    """A name of the encoder for `role`."""

    role: PoolingTask

    def schema(self, terms: Terms) -> Schema:
        names = self.names(terms)
        return model_names_schema(names) if names else {"type": "string"}

    def names(self, terms: Terms) -> tuple[str, ...]:
        return terms.encoders.get(self.role, EncoderTerms()).models


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
        encoder = terms.encoders.get("embedding", EncoderTerms())
        return Terms(encoder.models, encoder.vocab, terms.timeout_s, terms.strict)


@dataclass(frozen=True, slots=True)
class DimensionsField(DelegateKind):
    """The length of the embeddings, at most that of the model's."""

    def kind(self, terms: Terms) -> Int:
        return Int((1, terms.encoders.get("embedding", EncoderTerms()).dimension))


@dataclass(frozen=True, slots=True)
class PromptNameField(FieldKind):
    """One of the prompts in the embedding model's files."""

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
        return OneOf(names).wanted(terms) if names else "nothing, as the model's files have no prompts"

    def _names(self, terms: Terms) -> tuple[str, ...]:
        return terms.encoders.get("embedding", EncoderTerms()).prompts


def terms_of_encoder(model: ServedPoolingModel, names: tuple[str, ...]) -> EncoderTerms:
    """The terms of an encoder that is served under `names`."""
    card, inputs = model.card, model.inputs
    prompts = tuple(inputs.prompts) if isinstance(inputs, TextInputs) else ()
    return EncoderTerms(names, card.vocab, card.dimension, prompts)
