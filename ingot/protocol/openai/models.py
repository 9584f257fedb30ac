"""`GET /v1/models`: what is served, in the words of OpenAI's clients and of Anthropic's at once."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from ingot.engine.encoder_request import EncoderCard
from ingot.engine.request import ModelCard
from ingot.protocol.chat.sampling_defaults import sampling_body
from ingot.protocol.model_names import is_name
from ingot.protocol.schema.model_name import unknown_name
from ingot.protocol.served import Served
from ingot.text.formats.registry import FormatSource


class ModelBody(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["ingot"] = "ingot"
    max_model_len: int
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    default_sampling_params: dict[str, float | int] | UnsetType = UNSET  # what holds where a request says nothing
    tool_format: str | None = None
    thinking_format: str | None = None
    format_source: FormatSource | None = None
    input_modalities: list[str] = field(default_factory=lambda: ["text"])  # what it may be shown
    proposers: list[str] | UnsetType = UNSET  # who guesses ahead, as `speculate` may name them

    @classmethod
    def of(cls, card: ModelCard | EncoderCard, length: int) -> ModelBody:
        since = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
        return cls(
            id=card.name,
            created=card.created,
            max_model_len=length,
            display_name=card.name,
            created_at=since,
            max_input_tokens=length,
        )


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelBody]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


def list_models(served: Served) -> ModelList:
    bodies = [model_body(served), *(encoder_body(one.card) for one in served.encoders.values())]
    listed = list({body.id: body for body in reversed(bodies)}.values())[::-1]
    return ModelList(data=listed, first_id=listed[0].id, last_id=listed[-1].id)


def retrieve_model(name: str, served: Served) -> ModelBody:
    """The model served as `name`, under its own name."""
    if is_name(name, served.terms.models):
        return model_body(served)
    for role, encoder in served.encoders.items():
        if is_name(name, served.terms.encoders[role].models):
            return encoder_body(encoder.card)
    raise unknown_name(name, served.terms.every_model)


def model_body(served: Served) -> ModelBody:
    thinking = served.format.thinking
    return replace(
        ModelBody.of(served.card, served.card.context),
        default_sampling_params=sampling_body(served.sampling),
        tool_format=served.format.name,
        thinking_format=thinking.name if thinking is not None else None,
        format_source=served.format_source,
        input_modalities=["text", *served.terms.media.kinds],
        proposers=list(served.card.proposers),
    )


def encoder_body(card: EncoderCard) -> ModelBody:
    return ModelBody.of(card, card.length)
