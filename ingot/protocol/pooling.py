"""Requests for embeddings and rerank scores: `POST /v1/embeddings` (OpenAI), `/api/embed` and `/api/embeddings`
(Ollama), `/v1/rerank` and `/v2/rerank` (Jina, and both versions of Cohere, which agree in the main).

Each reader takes a decoded body and gives an `EncodingTask`: the engine's request, and how its numbers become a body.
Readers raise BadRequest, Unsupported and ModelNotFound. Pure translation.
"""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)

from __future__ import annotations

import base64
import math
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import PoolingModelCard, PoolingOutput, PoolingRequest, PoolingTask
from ingot.errors import BadRequest, Unsupported
from ingot.protocol.ollama.answers import to_nanoseconds
from ingot.protocol.ollama.request import (
    KEEP_ALIVE,
    OllamaDurationField,
    OllamaModelNameField,
    OllamaOptions,
    note_ignored_options,
)
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import BodyReading, Bool, Either, Int, ListOf, OneOf, Text, Timeout
from ingot.protocol.schema.model_fields import (
    ABOUT_TTL,
    DimensionsField,
    EncoderField,
    PromptNameField,
    TaskModelField,
    TimeToLiveField,
    TokenIdsField,
)
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires
from ingot.protocol.served import ServedTaskModel
from ingot.protocol.terms import DEFAULT_NAME
from ingot.text.tokenizer.encoder_inputs import EncoderInput, RerankInputs, TextInputs

if TYPE_CHECKING:
    from ingot.engine.pooling import ServedPoolingModel


EMBEDDING_TEXT = Text(least=1)
EMBEDDING_TOKENS = EncoderField(TokenIdsField(bounds.PROMPT_TOKENS))
EMBEDDING_INPUT = Either(
    (
        EMBEDDING_TEXT,
        ListOf(EMBEDDING_TEXT, bounds.EMBEDDING_INPUTS, least=1),
        EMBEDDING_TOKENS,
        ListOf(EMBEDDING_TOKENS, bounds.EMBEDDING_INPUTS, least=1),
    )
)
SEND_PROMPT_NAME = "is not known here: send prompt_name, with one of the prompts that the model's files name."


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingBody:
    input: EncoderInputValue | tuple[str, ...] | tuple[tuple[int, ...], ...] = requires(
        EMBEDDING_INPUT, "A text, a list of texts, a list of the model's own token ids, or a list of such lists."
    )
    model: str = accepts(TaskModelField("embedding"), "The embedding model's name, or `default`.", default=DEFAULT_NAME)
    encoding_format: str = accepts(
        OneOf(("float", "base64")), "`base64` is the little-endian float32 numbers of a vector.", default="float"
    )
    dimensions: int | None = accepts(
        DimensionsField(), "Cut vectors to this many numbers, which models that were trained for it take well."
    )
    user: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "Who asks; kept by nobody.")
    truncate: bool = accepts(
        Bool(), "Cut off the end of an input that is longer than the model reads. Else it is refused.", default=False
    )
    prompt_name: str | None = accepts(
        PromptNameField(), "Which of the model's prompts to put before each text (default: what its files say)."
    )
    timeout: float | None = accepts(Timeout(bounds.LEAST_TIMEOUT_S), "Seconds the request may take in all.")
    ttl: None = accepts(TimeToLiveField(), ABOUT_TTL)
    input_type: None = refuses(SEND_PROMPT_NAME)
    task: None = refuses(SEND_PROMPT_NAME)
    late_chunking: None = refuses("is not supported: each input is read by itself. Send false.", False)
    embedding_type: None = refuses("is not known here: send encoding_format.", "float")

    def each(self) -> tuple[EncoderInputValue, ...]:
        """The inputs, one by one."""
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return (self.input,)
        return self.input


EMBEDDING_BODY = ObjectOf(EmbeddingBody)


class EmbeddingItem(Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage
    ingot: EncodingReceipt


def read_embeddings(value: Any, served: ServedTaskModel, request_id: str) -> EncodingTask:
    """The job that a decoded body asks for. Tokenizes, so it may take a while: not for an event loop."""
    encoder, reading = encoder_of(served), served.reading()
    body: EmbeddingBody = EMBEDDING_BODY.parse(value, "", reading)
    inputs = encoder_inputs(served, body.each(), "input", body.prompt_name, truncate=body.truncate)
    request = make_encoding_request(served, "embedding", request_id, inputs, body.timeout)
    return EncodingTask(request, lambda encoded: embeddings_answer(encoded, request, body, encoder.card, reading))


def embeddings_answer(
    encoded: PoolingOutput, request: PoolingRequest, body: EmbeddingBody, card: PoolingModelCard, reading: BodyReading
) -> bytes:
    """The answer's body. Vectors are encoded one by one, so that other threads get their turn in between."""
    cut = body.dimensions is not None and body.dimensions < card.dimension
    vectors = [shorten_vector(row, body.dimensions or card.dimension, unit=card.unit) for row in encoded.rows]
    spelled = (encode_vector(vector, body.encoding_format) for vector in vectors)
    data = [msgspec.json.encode(EmbeddingItem(index=at, embedding=one)) for at, one in enumerate(spelled)]
    answer = EmbeddingList(
        data=cast(list[EmbeddingItem], [msgspec.Raw(one) for one in data]),
        model=card.name,
        usage=EmbeddingUsage(encoded.tokens, encoded.tokens),
        ingot=EncodingReceipt.of(encoded, request, reading, cut_from=card.dimension if cut else None),
    )
    return msgspec.json.encode(answer)


def shorten_vector(vector: Sequence[float], dimensions: int, *, unit: bool) -> Sequence[float]:
    """The first numbers of a vector, brought back to length 1 where the whole one has it."""
    if dimensions >= len(vector):
        return vector
    kept = vector[:dimensions]
    length = math.sqrt(sum(number * number for number in kept))
    return array("f", (number / length for number in kept)) if unit and length > 0 else kept


def encode_vector(vector: Sequence[float], encoding: str) -> list[float] | str:
    if encoding == "float":
        return list(vector)
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


OLLAMA_ENCODER_NAME = OllamaModelNameField(TaskModelField("embedding"))
OLLAMA_EMBED_TEXT = Text(least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaEmbedBody:
    input: str | tuple[str, ...] = requires(
        Either((OLLAMA_EMBED_TEXT, ListOf(OLLAMA_EMBED_TEXT, bounds.EMBEDDING_INPUTS, least=1))),
        "A text, or a list of texts.",
    )
    model: str = accepts(OLLAMA_ENCODER_NAME, "A name of the embedding model.", default=DEFAULT_NAME)
    truncate: bool = accepts(
        Bool(), "Cut off the end of an input that is longer than the model reads. Else it is refused.", default=True
    )
    dimensions: int | None = accepts(DimensionsField(), "Cut vectors to this many numbers.")
    options: OllamaOptions | None = accepts(
        EncoderField(ObjectOf(OllamaOptions)), "Settled when the model was loaded; without effect."
    )
    keep_alive: None = accepts(OllamaDurationField(), KEEP_ALIVE)

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.input,) if isinstance(self.input, str) else self.input


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaOldEmbeddingBody:
    prompt: str = requires(OLLAMA_EMBED_TEXT, "A text.")
    model: str = accepts(OLLAMA_ENCODER_NAME, "A name of the embedding model.", default=DEFAULT_NAME)
    options: OllamaOptions | None = accepts(
        EncoderField(ObjectOf(OllamaOptions)), "Settled when the model was loaded; without effect."
    )
    keep_alive: None = accepts(OllamaDurationField(), KEEP_ALIVE)


OLLAMA_EMBED_BODY = ObjectOf(OllamaEmbedBody)
OLLAMA_OLD_EMBEDDING_BODY = ObjectOf(OllamaOldEmbeddingBody)


class OllamaEmbedded(Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    ingot: EncodingReceipt


class OllamaOldEmbedding(Struct):
    embedding: list[float]
    ingot: EncodingReceipt


def read_ollama_embed(value: Any, served: ServedTaskModel, request_id: str) -> EncodingTask:
    """The job that a decoded body asks for. Tokenizes, so it may take a while: not for an event loop."""
    encoder, reading = encoder_of(served), served.reading()
    body: OllamaEmbedBody = OLLAMA_EMBED_BODY.parse(value, "", reading)
    note_unheeded_embed_options(body.options, value, encoder.card, reading)
    inputs = encoder_inputs(served, body.texts, "input", truncate=body.truncate)
    request = make_encoding_request(served, "embedding", request_id, inputs)

    def make_body(encoded: PoolingOutput) -> bytes:
        width = body.dimensions or encoder.card.dimension
        cut = width < encoder.card.dimension
        return msgspec.json.encode(
            OllamaEmbedded(
                encoder.card.name,
                [list(shorten_vector(row, width, unit=encoder.card.unit)) for row in encoded.rows],
                to_nanoseconds(encoded.queue_s + encoded.compute_s),
                0,
                encoded.tokens,
                EncodingReceipt.of(encoded, request, reading, cut_from=encoder.card.dimension if cut else None),
            )
        )

    return EncodingTask(request, make_body)


def read_ollama_old_embedding(value: Any, served: ServedTaskModel, request_id: str) -> EncodingTask:
    encoder, reading = encoder_of(served), served.reading()
    body: OllamaOldEmbeddingBody = OLLAMA_OLD_EMBEDDING_BODY.parse(value, "", reading)
    note_unheeded_embed_options(body.options, value, encoder.card, reading)
    inputs = encoder_inputs(served, (body.prompt,), "prompt", truncate=True)
    request = make_encoding_request(served, "embedding", request_id, inputs)

    def make_body(encoded: PoolingOutput) -> bytes:
        receipt = EncodingReceipt.of(encoded, request, reading)
        return msgspec.json.encode(OllamaOldEmbedding(list(encoded.rows[0]), receipt))

    return EncodingTask(request, make_body)


def note_unheeded_embed_options(
    options: OllamaOptions | None, value: Any, card: PoolingModelCard, reading: BodyReading
) -> None:
    if options is not None:
        note_ignored_options(value["options"], options, card.length, reading)


RerankVersion = Literal["1", "2"]


@dataclass(frozen=True, slots=True)
class RerankDocument:
    text: str = requires(Text(), "What is ranked.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankBody:
    query: str = requires(Text(least=1), "What the documents are to answer.")
    documents: tuple[str | RerankDocument, ...] = requires(
        ListOf(Either((Text(), ObjectOf(RerankDocument))), bounds.RERANK_DOCUMENTS, least=1),
        "Texts, or objects with a `text`.",
    )
    model: str = accepts(TaskModelField("rerank"), "The reranking model's name, or `default`.", default=DEFAULT_NAME)
    top_n: int | None = accepts(Int(bounds.TOP_N), "Give only this many, the best ones (default: all).")
    return_documents: bool = accepts(Bool(), "Give each document's text back.", default=False)
    max_tokens_per_doc: int | None = accepts(
        Int(bounds.MAX_TOKENS), "Read only this many tokens of each document (default: all)."
    )
    truncate: bool = accepts(
        Bool(),
        "Cut off the end of a document that is longer than the model reads beside the query. Else it is refused.",
        default=False,
    )
    raw_scores: bool = accepts(
        Bool(), "Give the model's scores as they are, not squashed to between 0 and 1.", default=False
    )
    instruction: str | None = accepts(
        Text(bounds.INSTRUCTION_CHARS), "What makes a document a good one. Only for models that take one."
    )
    timeout: float | None = accepts(Timeout(bounds.LEAST_TIMEOUT_S), "Seconds the request may take in all.")
    ttl: None = accepts(TimeToLiveField(), ABOUT_TTL)
    rank_fields: None = refuses("is not supported: a document's text is ranked, and nothing else.", ["text"])
    max_chunks_per_doc: None = refuses("is not supported: a document is read in one piece. Send 1.", 1)
    relevant_spans: None = refuses("is not supported: documents are scored whole.")
    priority: None = refuses("is not supported: requests are taken as they come.", 0)

    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]


RERANK_BODY = ObjectOf(RerankBody)


class RankedDocument(Struct):
    text: str


class RankedResult(Struct):
    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class RerankApiVersion(Struct):
    version: RerankVersion


class RerankTokens(Struct):
    input_tokens: int


class RerankMeta(Struct):
    """What Cohere's clients look for, where Jina's look at the usage."""

    api_version: RerankApiVersion
    tokens: RerankTokens


class RerankAnswer(Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[RankedResult]
    usage: EmbeddingUsage
    meta: RerankMeta
    ingot: EncodingReceipt


def read_rerank(value: Any, served: ServedTaskModel, request_id: str, *, version: RerankVersion = "1") -> EncodingTask:
    """The job that a decoded body asks for. Tokenizes, so it may take a while: not for an event loop."""
    encoder, reading = encoder_of(served), served.reading()
    body: RerankBody = RERANK_BODY.parse(value, "", reading)
    inputs = encoder.inputs
    assert isinstance(inputs, RerankInputs), "the reranking model reads pairs"
    if body.instruction is not None and not inputs.takes_instruction:
        raise Unsupported(
            f"instruction: {encoder.card.name} takes none, as it is a cross-encoder.", param="instruction"
        )
    most, truncate = body.max_tokens_per_doc, body.truncate
    pairs = inputs.read(body.query, body.texts(), instruction=body.instruction, most=most, truncate=truncate)
    request = make_encoding_request(served, "rerank", request_id, pairs, body.timeout)
    return EncodingTask(request, lambda encoded: rerank_answer(encoded, request, body, encoder.card, reading, version))


def rerank_answer(
    encoded: PoolingOutput,
    request: PoolingRequest,
    body: RerankBody,
    card: PoolingModelCard,
    reading: BodyReading,
    version: RerankVersion,
) -> bytes:
    texts = body.texts()
    scores = [row[0] if body.raw_scores else sigmoid_score(row[0]) for row in encoded.rows]
    best = sorted(range(len(scores)), key=lambda at: (-encoded.rows[at][0], at))[: body.top_n]
    answer = RerankAnswer(
        id=request.id,
        model=card.name,
        results=[
            RankedResult(at, scores[at], RankedDocument(texts[at]) if body.return_documents else UNSET) for at in best
        ],
        usage=EmbeddingUsage(encoded.tokens, encoded.tokens),
        meta=RerankMeta(RerankApiVersion(version), RerankTokens(encoded.tokens)),
        ingot=EncodingReceipt.of(encoded, request, reading),
    )
    return msgspec.json.encode(answer)


def sigmoid_score(score: float) -> float:
    """The logistic function, which gives a probability where the score is the logarithm of the odds."""
    grown = math.exp(-abs(score))
    return 1 / (1 + grown) if score >= 0 else grown / (1 + grown)


read_rerank_v2 = partial(read_rerank, version="2")


EncoderInputValue = str | tuple[int, ...]


def encoder_of(served: ServedTaskModel) -> ServedPoolingModel:
    return cast("ServedPoolingModel", served.loaded)


@dataclass(frozen=True, slots=True)
class EncodingTask:
    """A body, read: what the engine is to compute, and how the answer's body is made of it."""

    request: PoolingRequest
    make_body: Callable[[PoolingOutput], bytes]


def make_encoding_request(
    served: ServedTaskModel,
    role: PoolingTask,
    request_id: str,
    inputs: Sequence[EncoderInput],
    timeout: float | None = None,
) -> PoolingRequest:
    deadline = time.monotonic() + (served.terms.timeout_s if timeout is None else timeout)
    return PoolingRequest(request_id, role, tuple(inputs), served.tenant, deadline)


def encoder_inputs(
    served: ServedTaskModel,
    values: Sequence[EncoderInputValue],
    param: str,
    prompt: str | None = None,
    *,
    truncate: bool,
) -> list[EncoderInput]:
    """What the embedding model reads: texts, or its own tokens. A refusal names the one that is to blame."""
    inputs = encoder_of(served).inputs
    assert isinstance(inputs, TextInputs), "the embedding model reads single texts"
    made = []
    for at, one in enumerate(values):
        try:
            if isinstance(one, str):
                made.append(inputs.read(one, prompt=prompt, truncate=truncate))
            else:
                made.append(inputs.take(one, truncate=truncate))
        except BadRequest as error:
            error.param = param if len(values) == 1 else f"{param}.{at}"
            raise
    return made


class ComputeTiming(Struct):
    """Seconds spent waiting and computing."""

    queue_s: float
    compute_s: float


class EncodingReceipt(Struct, kw_only=True):
    """What the server did beyond the answer. `truncated` inputs lost their end, as the request allowed; vectors were
    `cut_from` so many numbers, as it asked."""

    timing: ComputeTiming
    truncated: int | UnsetType = UNSET
    cut_from: int | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET

    @classmethod
    def of(
        cls, encoded: PoolingOutput, request: PoolingRequest, reading: BodyReading, *, cut_from: int | None = None
    ) -> EncodingReceipt:
        return cls(
            timing=ComputeTiming(round(encoded.queue_s, 6), round(encoded.compute_s, 6)),
            truncated=sum(piece.cut for piece in request.inputs) or UNSET,
            cut_from=cut_from or UNSET,
            ignored=reading.ignored or UNSET,
        )
