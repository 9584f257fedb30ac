"""`POST /api/embed`, and `/api/embeddings`, which came before it: vectors of texts as Ollama's clients read them."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from ingot.engine.encoder_request import Encoded, EncoderCard
from ingot.protocol.encoders import EncodingReceipt, EncodingTask, encoder_for, encoding_request, inputs_of
from ingot.protocol.model_names import DEFAULT_NAME
from ingot.protocol.ollama.answers import nanoseconds
from ingot.protocol.ollama.options import Options, note_unheeded
from ingot.protocol.ollama.request import KEEP_ALIVE, Duration, OllamaName
from ingot.protocol.openai.embeddings import shortened
from ingot.protocol.schema import bounds
from ingot.protocol.schema.encoder_fields import Dimensions, EncoderName
from ingot.protocol.schema.fields import BodyReading, Bool, Either, ListOf, Text
from ingot.protocol.schema.objects import ObjectOf, accepts, requires
from ingot.protocol.side_served import SideServed

NAME = OllamaName(EncoderName("embedding"))
TEXT = Text(least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedBody:
    input: str | tuple[str, ...] = requires(
        Either((TEXT, ListOf(TEXT, bounds.EMBEDDING_INPUTS, least=1))), "A text, or a list of texts."
    )
    model: str = accepts(NAME, "A name of the embedding model.", default=DEFAULT_NAME)
    truncate: bool = accepts(
        Bool(), "Cut off the end of an input that is longer than the model reads. Else it is refused.", default=True
    )
    dimensions: int | None = accepts(Dimensions(), "Cut vectors to this many numbers.")
    options: Options | None = accepts(ObjectOf(Options), "Settled when the model was loaded; without effect.")
    keep_alive: None = accepts(Duration(), KEEP_ALIVE)

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.input,) if isinstance(self.input, str) else self.input


@dataclass(frozen=True, slots=True, kw_only=True)
class OldEmbeddingBody:
    prompt: str = requires(TEXT, "A text.")
    model: str = accepts(NAME, "A name of the embedding model.", default=DEFAULT_NAME)
    options: Options | None = accepts(ObjectOf(Options), "Settled when the model was loaded; without effect.")
    keep_alive: None = accepts(Duration(), KEEP_ALIVE)


EMBED_BODY = ObjectOf(EmbedBody)
OLD_EMBEDDING_BODY = ObjectOf(OldEmbeddingBody)


class OllamaEmbedded(Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    ingot: EncodingReceipt


class OldEmbedding(Struct):
    embedding: list[float]
    ingot: EncodingReceipt


def read_embed(value: Any, served: SideServed, request_id: str) -> EncodingTask:
    """The job that a decoded body asks for. Tokenizes, so it may take a while: not for an event loop."""
    encoder, reading = encoder_for(served, "embedding"), served.reading()
    body: EmbedBody = EMBED_BODY.parse(value, "", reading)
    heed(body.options, value, encoder.card, reading)
    inputs = inputs_of(served, body.texts, "input", truncate=body.truncate)
    request = encoding_request(served, "embedding", request_id, inputs)

    def told(encoded: Encoded) -> bytes:
        width = body.dimensions or encoder.card.dimension
        cut = width < encoder.card.dimension
        return msgspec.json.encode(
            OllamaEmbedded(
                encoder.card.name,
                [list(shortened(row, width, unit=encoder.card.unit)) for row in encoded.rows],
                nanoseconds(encoded.queue_s + encoded.compute_s),
                0,
                encoded.tokens,
                EncodingReceipt.of(encoded, request, reading, cut_from=encoder.card.dimension if cut else None),
            )
        )

    return EncodingTask(request, told)


def read_old_embedding(value: Any, served: SideServed, request_id: str) -> EncodingTask:
    encoder, reading = encoder_for(served, "embedding"), served.reading()
    body: OldEmbeddingBody = OLD_EMBEDDING_BODY.parse(value, "", reading)
    heed(body.options, value, encoder.card, reading)
    inputs = inputs_of(served, (body.prompt,), "prompt", truncate=True)
    request = encoding_request(served, "embedding", request_id, inputs)

    def told(encoded: Encoded) -> bytes:
        receipt = EncodingReceipt.of(encoded, request, reading)
        return msgspec.json.encode(OldEmbedding(list(encoded.rows[0]), receipt))

    return EncodingTask(request, told)


def heed(options: Options | None, value: Any, card: EncoderCard, reading: BodyReading) -> None:
    if options is not None:
        note_unheeded(value["options"], options, card.length, reading)
