"""`POST /v1/embeddings`: the body as OpenAI describes it, and the vectors as its clients read them."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)
from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct

from ingot.engine.encoder_request import Encoded, EncoderCard, EncodingRequest
from ingot.protocol.encoders import EncodingReceipt, EncodingTask, OneInput, encoder_for, encoding_request, inputs_of
from ingot.protocol.model_names import DEFAULT_NAME
from ingot.protocol.schema import bounds
from ingot.protocol.schema.encoder_fields import Dimensions, EncoderName, EncoderTokenIds, PromptName
from ingot.protocol.schema.fields import BodyReading, Bool, Either, ListOf, OneOf, Text, Timeout
from ingot.protocol.schema.keeping import HOW_LONG, TimeToLive
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires
from ingot.protocol.side_served import SideServed

TEXT = Text(least=1)
TOKENS = EncoderTokenIds(bounds.PROMPT_TOKENS)
INPUT = Either(
    (TEXT, ListOf(TEXT, bounds.EMBEDDING_INPUTS, least=1), TOKENS, ListOf(TOKENS, bounds.EMBEDDING_INPUTS, least=1))
)
PROMPTED = "is not known here: send prompt_name, with one of the prompts that the model's files name."


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingBody:
    input: OneInput | tuple[str, ...] | tuple[tuple[int, ...], ...] = requires(
        INPUT, "A text, a list of texts, a list of the model's own token ids, or a list of such lists."
    )
    model: str = accepts(EncoderName("embedding"), "The embedding model's name, or `default`.", default=DEFAULT_NAME)
    encoding_format: str = accepts(
        OneOf(("float", "base64")), "`base64` is the little-endian float32 numbers of a vector.", default="float"
    )
    dimensions: int | None = accepts(
        Dimensions(), "Cut vectors to this many numbers, which models that were trained for it take well."
    )
    user: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "Who asks; kept by nobody.")
    truncate: bool = accepts(
        Bool(), "Cut off the end of an input that is longer than the model reads. Else it is refused.", default=False
    )
    prompt_name: str | None = accepts(
        PromptName(), "Which of the model's prompts to put before each text (default: what its files say)."
    )
    timeout: float | None = accepts(Timeout(bounds.LEAST_TIMEOUT_S), "Seconds the request may take in all.")
    ttl: None = accepts(TimeToLive(), HOW_LONG)
    input_type: None = refuses(PROMPTED)
    task: None = refuses(PROMPTED)
    late_chunking: None = refuses("is not supported: each input is read by itself. Send false.", False)
    embedding_type: None = refuses("is not known here: send encoding_format.", "float")

    def each(self) -> tuple[OneInput, ...]:
        """The inputs, one by one."""
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return (self.input,)
        return self.input


EMBEDDING_BODY = ObjectOf(EmbeddingBody)


class Embedding(Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    ingot: EncodingReceipt


def read_embeddings(value: Any, served: SideServed, request_id: str) -> EncodingTask:
    """The job that a decoded body asks for. Tokenizes, so it may take a while: not for an event loop."""
    encoder = encoder_for(served, "embedding")
    reading = served.reading()
    body: EmbeddingBody = EMBEDDING_BODY.parse(value, "", reading)
    inputs = inputs_of(served, body.each(), "input", body.prompt_name, truncate=body.truncate)
    request = encoding_request(served, "embedding", request_id, inputs, body.timeout)
    return EncodingTask(request, lambda encoded: answer_body(encoded, request, body, encoder.card, reading))


def answer_body(
    encoded: Encoded, request: EncodingRequest, body: EmbeddingBody, card: EncoderCard, reading: BodyReading
) -> bytes:
    """The answer's body. Vectors are encoded one by one, so that other threads get their turn in between."""
    cut = body.dimensions is not None and body.dimensions < card.dimension
    vectors = [shortened(row, body.dimensions or card.dimension, unit=card.unit) for row in encoded.rows]
    spelled = (spell(vector, body.encoding_format) for vector in vectors)
    data = [msgspec.json.encode(Embedding(index=at, embedding=one)) for at, one in enumerate(spelled)]
    answer = EmbeddingList(
        data=cast(list[Embedding], [msgspec.Raw(one) for one in data]),
        model=card.name,
        usage=EmbeddingUsage(encoded.tokens, encoded.tokens),
        ingot=EncodingReceipt.of(encoded, request, reading, cut_from=card.dimension if cut else None),
    )
    return msgspec.json.encode(answer)


def shortened(vector: Sequence[float], dimensions: int, *, unit: bool) -> Sequence[float]:
    """The first numbers of a vector, brought back to length 1 where the whole one has it."""
    if dimensions >= len(vector):
        return vector
    kept = vector[:dimensions]
    length = math.sqrt(sum(number * number for number in kept))
    return array("f", (number / length for number in kept)) if unit and length > 0 else kept


def spell(vector: Sequence[float], encoding: str) -> list[float] | str:
    if encoding == "float":
        return list(vector)
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
