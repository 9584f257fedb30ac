"""`GET /v1/models`: what is served, in the words of OpenAI's clients and of Anthropic's at once."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final, Literal

from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from ingot.engine.encoder_request import EncoderCard
from ingot.engine.fleet_standing import ModelState, Standing
from ingot.engine.model_card import ModelCard
from ingot.engine.request import LoraRef
from ingot.engine.speaking.request import SpeakingCard
from ingot.engine.speech_request import HearingCard
from ingot.protocol.chat.sampling_defaults import sampling_body
from ingot.protocol.model_names import is_name, unknown_name
from ingot.protocol.schema.model_name import adapter_in
from ingot.protocol.served import Served
from ingot.protocol.side_served import SideServed
from ingot.text.tool_formats.registry import FormatSource

NEVER_MADE: Final = "1970-01-01T00:00:00Z"


class ModelBody(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["ingot"] = "ingot"
    max_model_len: int | UnsetType = UNSET  # not known of one that was never loaded
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | UnsetType = UNSET
    default_sampling_params: dict[str, float | int] | UnsetType = UNSET  # what holds where a request says nothing
    chats: bool | UnsetType = UNSET  # false: it has no chat template, and only goes on with texts
    tool_format: str | None = None
    thinking_format: str | None = None
    format_source: FormatSource | None = None
    input_modalities: list[str] = field(default_factory=lambda: ["text"])  # what it may be shown
    languages: list[str] | UnsetType = UNSET  # that it hears
    output_modalities: list[str] = field(default_factory=lambda: ["text"])
    voices: list[str] | UnsetType = UNSET  # that it speaks with
    proposers: list[str] | UnsetType = UNSET  # who guesses ahead, as `speculate` may name them
    parent: str | UnsetType = UNSET  # of an adapter: the model that it stands beside
    rank: int | UnsetType = UNSET
    state: ModelState = "loaded"
    kind: str | UnsetType = UNSET  # what it is for: chat where nothing is said
    aliases: list[str] | UnsetType = UNSET
    pinned: bool | UnsetType = UNSET
    progress: float | UnsetType = UNSET  # of its load, from 0 to 1
    failure: str | UnsetType = UNSET  # why it could not be loaded
    memory_bytes: int | UnsetType = UNSET  # that it has, or is to have
    expires_in_s: float | UnsetType = UNSET  # when it is unloaded, unless somebody asks for it

    @classmethod
    def of(cls, card: ModelCard | EncoderCard | HearingCard | SpeakingCard, length: int) -> ModelBody:
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
    return _listed([model_body(served), *beside(served)])


def list_standings(standings: Iterable[tuple[Standing, SideServed | None]]) -> ModelList:
    """Several models, and what those that are loaded have beside them."""
    bodies: list[ModelBody] = []
    for stands, served in standings:
        bodies += [standing_body(stands, served), *(beside(served) if isinstance(served, Served) else ())]
    return _listed(bodies)


def beside(served: Served) -> list[ModelBody]:
    """Adapters, and models for other things."""
    adapters = [adapter_body(served, lora) for lora in served.terms.loras.values()]
    bodies = [*adapters, *(encoder_body(one.card) for one in served.encoders.values())]
    if served.hearing is not None:
        bodies.append(hearing_body(served.hearing))
    if served.speaking is not None:
        bodies.append(speaking_body(served.speaking.card))
    return bodies


def _listed(bodies: list[ModelBody]) -> ModelList:
    listed = list({body.id: body for body in reversed(bodies)}.values())[::-1]
    return ModelList(data=listed, first_id=listed[0].id if listed else "", last_id=listed[-1].id if listed else "")


def standing_body(stands: Standing, served: SideServed | None) -> ModelBody:
    """How a model of several stands; what is `served` of it is known of one that was used."""
    if served is None:
        body = ModelBody(id=stands.name, created=0, display_name=stands.name, created_at=NEVER_MADE)
    else:
        body = body_of(served)
    return replace(
        body,
        state=stands.state,
        kind=stands.kind,
        aliases=list(stands.aliases),
        pinned=stands.pinned,
        progress=UNSET if stands.progress is None else round(stands.progress, 3),
        failure=UNSET if stands.failure is None else stands.failure,
        memory_bytes=stands.claimed,
        expires_in_s=UNSET if stands.expires_s is None else round(stands.expires_s, 3),
    )


def body_of(served: SideServed) -> ModelBody:
    if isinstance(served, Served):
        return model_body(served)
    if isinstance(served.card, EncoderCard):
        return encoder_body(served.card)
    if isinstance(served.card, SpeakingCard):
        return speaking_body(served.card)
    assert isinstance(served.card, HearingCard), "every other model that is served alone"
    return hearing_body(served.card)


def retrieve_model(name: str, served: Served) -> ModelBody:
    """The model or the adapter served as `name`, under its own name."""
    if (adapter := adapter_in(name, served.terms)) is not None:
        return adapter_body(served, served.terms.loras[adapter])
    if is_name(name, served.terms.models):
        return model_body(served)
    for role, encoder in served.encoders.items():
        if is_name(name, served.terms.encoders[role].models):
            return encoder_body(encoder.card)
    if served.hearing is not None and is_name(name, served.terms.hearing.models):
        return hearing_body(served.hearing)
    if served.speaking is not None and is_name(name, served.terms.speaking.models):
        return speaking_body(served.speaking.card)
    raise unknown_name(name, served.terms.every_model)


def model_body(served: Served) -> ModelBody:
    thinking = served.format.thinking
    return replace(
        ModelBody.of(served.card, served.card.context),
        default_sampling_params=sampling_body(served.sampling),
        chats=served.tokenizer.template is not None,
        tool_format=served.format.name,
        thinking_format=thinking.name if thinking is not None else None,
        format_source=served.format_source,
        input_modalities=["text", *served.terms.media.kinds],
        proposers=list(served.card.proposers),
    )


def adapter_body(served: Served, lora: LoraRef) -> ModelBody:
    return replace(model_body(served), id=lora.name, display_name=lora.name, parent=served.card.name, rank=lora.rank)


def encoder_body(card: EncoderCard) -> ModelBody:
    return replace(ModelBody.of(card, card.length), kind=card.role)


def hearing_body(card: HearingCard) -> ModelBody:
    body = ModelBody.of(card, card.context)
    return replace(body, kind="audio", input_modalities=["audio"], languages=list(card.languages))


def speaking_body(card: SpeakingCard) -> ModelBody:
    body = ModelBody.of(card, card.context)
    return replace(body, kind="speech", output_modalities=["audio"], voices=list(card.voices))
