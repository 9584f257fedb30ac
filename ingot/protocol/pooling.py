"""`POST /v1/rerank` and `/v2/rerank`: the bodies of Jina and of both versions of Cohere, which agree in the main."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ingot.engine.encoder_request import Encoded, EncoderCard, EncodingRequest
from ingot.errors import Unsupported
from ingot.protocol.encoders import EncodingReceipt, EncodingTask, encoder_for, encoding_request
from ingot.protocol.model_names import DEFAULT_NAME
from ingot.protocol.schema import bounds
from ingot.protocol.schema.encoder_fields import EncoderName
from ingot.protocol.schema.fields import BodyReading, Bool, Either, Int, ListOf, Text, Timeout
from ingot.protocol.schema.keeping import HOW_LONG, TimeToLive
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires
from ingot.protocol.side_served import SideServed
from ingot.text.tokenizer.encoder_inputs import RerankInputs

Version = Literal["1", "2"]


@dataclass(frozen=True, slots=True)
class Document:
    text: str = requires(Text(), "What is ranked.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankBody:
    query: str = requires(Text(least=1), "What the documents are to answer.")
    documents: tuple[str | Document, ...] = requires(
        ListOf(Either((Text(), ObjectOf(Document))), bounds.RERANK_DOCUMENTS, least=1),
        "Texts, or objects with a `text`.",
    )
    model: str = accepts(EncoderName("rerank"), "The reranking model's name, or `default`.", default=DEFAULT_NAME)
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
    ttl: None = accepts(TimeToLive(), HOW_LONG)
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


class RerankUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class ApiVersion(Struct):
    version: Version


class RerankTokens(Struct):
    input_tokens: int


class RerankMeta(Struct):
    """What Cohere's clients look for, where Jina's look at the usage."""

    api_version: ApiVersion
    tokens: RerankTokens


class Reranked(Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[RankedResult]
    usage: RerankUsage
    meta: RerankMeta
    ingot: EncodingReceipt


def read_rerank(value: Any, served: SideServed, request_id: str, *, version: Version = "1") -> EncodingTask:
    """The job that a decoded body asks for. Tokenizes, so it may take a while: not for an event loop."""
    encoder = encoder_for(served, "rerank")
    reading = served.reading()
    body: RerankBody = RERANK_BODY.parse(value, "", reading)
    inputs = encoder.inputs
    assert isinstance(inputs, RerankInputs), "the reranking model reads pairs"
    if body.instruction is not None and not inputs.takes_instruction:
        raise Unsupported(
            f"instruction: {encoder.card.name} takes none, as it is a cross-encoder.", param="instruction"
        )
    most, truncate = body.max_tokens_per_doc, body.truncate
    pairs = inputs.read(body.query, body.texts(), instruction=body.instruction, most=most, truncate=truncate)
    request = encoding_request(served, "rerank", request_id, pairs, body.timeout)
    return EncodingTask(request, lambda encoded: answer_body(encoded, request, body, encoder.card, reading, version))


def answer_body(
    encoded: Encoded,
    request: EncodingRequest,
    body: RerankBody,
    card: EncoderCard,
    reading: BodyReading,
    version: Version,
) -> bytes:
    texts = body.texts()
    scores = [row[0] if body.raw_scores else squashed(row[0]) for row in encoded.rows]
    best = sorted(range(len(scores)), key=lambda at: (-encoded.rows[at][0], at))[: body.top_n]
    answer = Reranked(
        id=request.id,
        model=card.name,
        results=[
            RankedResult(at, scores[at], RankedDocument(texts[at]) if body.return_documents else UNSET) for at in best
        ],
        usage=RerankUsage(encoded.tokens, encoded.tokens),
        meta=RerankMeta(ApiVersion(version), RerankTokens(encoded.tokens)),
        ingot=EncodingReceipt.of(encoded, request, reading),
    )
    return msgspec.json.encode(answer)


def squashed(score: float) -> float:
    """The logistic function, which gives a probability where the score is the logarithm of the odds."""
    grown = math.exp(-abs(score))
    return 1 / (1 + grown) if score >= 0 else grown / (1 + grown)
