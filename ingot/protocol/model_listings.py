"""What is served, in the words of each client: `GET /v1/models` for OpenAI's and Anthropic's at once, and `/api/tags`,
`/api/ps`, `/api/show` and `/api/version` for Ollama's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from ingot.engine.request import LoraRef, ModelCard, PoolingModelCard
from ingot.engine.speech_request import SpeechToTextCard, TextToSpeechCard
from ingot.engine.status import ModelState, ModelStatus
from ingot.protocol.chat.answers import IgnoredNote
from ingot.protocol.chat.preparation import model_thinks
from ingot.protocol.chat.sampling_defaults import sampling_body
from ingot.protocol.ollama.request import OllamaModelNameField
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import Bool, Text
from ingot.protocol.schema.model_fields import adapter_named_in
from ingot.protocol.schema.objects import ObjectOf, accepts, requires
from ingot.protocol.served import AnyServedModel, ServedModel, TaskCard
from ingot.protocol.terms import DEFAULT_NAME, matches_model_name, unknown_model_error
from ingot.text.tool_formats.registry import FormatSource
from ingot.version import __version__

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
    input_modalities: list[str] = field(default_factory=lambda: ["text"])  # what it takes
    languages: list[str] | UnsetType = UNSET  # that it transcribes
    output_modalities: list[str] = field(default_factory=lambda: ["text"])
    voices: list[str] | UnsetType = UNSET  # that it speaks with
    proposers: list[str] | UnsetType = UNSET  # of draft tokens, as `speculate` may name them
    parent: str | UnsetType = UNSET  # of an adapter: its base model
    rank: int | UnsetType = UNSET
    state: ModelState = "loaded"
    kind: str | UnsetType = UNSET  # chat where it is left out
    aliases: list[str] | UnsetType = UNSET
    pinned: bool | UnsetType = UNSET
    progress: float | UnsetType = UNSET  # of its load, from 0 to 1
    failure: str | UnsetType = UNSET  # why it could not be loaded
    memory_bytes: int | UnsetType = UNSET  # that it has, or is to have
    expires_in_s: float | UnsetType = UNSET  # when it is unloaded, unless somebody asks for it

    @classmethod
    def of(cls, card: ModelCard | TaskCard) -> ModelBody:
        since = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
        return cls(
            id=card.name,
            created=card.created,
            max_model_len=card.context,
            display_name=card.name,
            created_at=since,
            max_input_tokens=card.context,
        )


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelBody]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


def list_models(models: Iterable[tuple[ModelStatus, AnyServedModel | None]]) -> ModelList:
    """All models, and the adapters of those that are loaded."""
    bodies: list[ModelBody] = []
    for status, served in models:
        bodies.append(fleet_model_body(status, served))
        if isinstance(served, ServedModel):
            bodies += [adapter_model_body(served, lora) for lora in served.terms.loras.values()]
    listed = list({body.id: body for body in reversed(bodies)}.values())[::-1]
    return ModelList(data=listed, first_id=listed[0].id if listed else "", last_id=listed[-1].id if listed else "")


def fleet_model_body(status: ModelStatus, served: AnyServedModel | None) -> ModelBody:
    """How a model stands; what is `served` of it is known of one that was used."""
    if served is None:
        body = stated_model_body(status)
    elif isinstance(served, ServedModel):
        body = generating_model_body(served)
    else:
        body = task_model_body(served.card)
    if status.resident:
        return body  # there is nothing to tell of how it stands
    return replace(
        body,
        state=status.state,
        kind=status.kind,
        aliases=list(status.aliases),
        pinned=status.pinned,
        progress=UNSET if status.progress is None else round(status.progress, 3),
        failure=UNSET if status.failure is None else status.failure,
        memory_bytes=status.claimed,
        expires_in_s=UNSET if status.expires_s is None else round(status.expires_s, 3),
    )


def stated_model_body(status: ModelStatus) -> ModelBody:
    """Of a model that is not loaded: what its files say."""
    body = ModelBody(id=status.name, created=0, display_name=status.name, created_at=NEVER_MADE)
    if (stated := status.stated) is None:
        return body
    return replace(
        body,
        max_model_len=stated.context,
        max_input_tokens=stated.context,
        input_modalities=["text", *stated.media],
        tool_format=stated.tool_format,
        thinking_format=stated.thinking_format,
    )


def retrieve_model(name: str, served: ServedModel, names: Iterable[str]) -> ModelBody:
    """The model or the adapter served as `name`, under its own name. `names` are all that are served."""
    if (adapter := adapter_named_in(name, served.terms)) is not None:
        return adapter_model_body(served, served.terms.loras[adapter])
    if matches_model_name(name, served.terms.models):
        return generating_model_body(served)
    raise unknown_model_error(name, names)


def generating_model_body(served: ServedModel) -> ModelBody:
    thinking = served.format.thinking
    return replace(
        ModelBody.of(served.card),
        default_sampling_params=sampling_body(served.sampling),
        chats=served.tokenizer.template is not None,
        tool_format=served.format.name,
        thinking_format=thinking.name if thinking is not None else None,
        format_source=served.format_source,
        input_modalities=["text", *served.terms.media.kinds],
        proposers=list(served.card.proposers),
    )


def adapter_model_body(served: ServedModel, lora: LoraRef) -> ModelBody:
    return replace(
        generating_model_body(served), id=lora.name, display_name=lora.name, parent=served.card.name, rank=lora.rank
    )


def task_model_body(card: TaskCard) -> ModelBody:
    body = replace(ModelBody.of(card), kind=card.kind)
    if isinstance(card, SpeechToTextCard):
        return replace(body, input_modalities=["audio"], languages=list(card.languages))
    if isinstance(card, TextToSpeechCard):
        return replace(body, output_modalities=["audio"], voices=list(card.voices))
    return body


@dataclass(frozen=True, slots=True, kw_only=True)
class AddModelBody:
    model: str = requires(Text(bounds.NAME_CHARS, least=1), "A short name, or a hub id such as org/name.")


ADD_MODEL_BODY = ObjectOf(AddModelBody)


class RecommendedModel(Struct):
    id: str  # a short name
    task: str
    hub_id: str
    parameters: float  # billions
    download_bytes: int
    weight_bytes: int
    context: int  # that there is room for; 0: it has none


class RecommendedList(Struct):
    data: list[RecommendedModel]
    object: Literal["list"] = "list"


OLLAMA_VERSION: Final = "0.13.0"
"""The version of Ollama whose protocol this is: clients refuse to talk to old ones."""
OLLAMA_OPTION_NAMES: Final = {"repetition_penalty": "repeat_penalty"}
NEVER_EXPIRES: Final = "9999-12-31T23:59:59Z"

OllamaCapability = Literal["completion", "tools", "insert", "thinking", "vision", "embedding"]


class OllamaVersion(Struct):
    version: str
    ingot: str


class OllamaDetails(Struct):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaListed(Struct):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaTags(Struct):
    models: list[OllamaListed]


class OllamaLoaded(Struct):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int
    state: ModelState = "loaded"
    progress: float | UnsetType = UNSET  # of its load, from 0 to 1


class OllamaRunning(Struct):
    models: list[OllamaLoaded]


class OllamaShown(Struct):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[OllamaCapability]
    modified_at: str
    ingot: IgnoredNote | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaShowBody:
    model: str = accepts(OllamaModelNameField(), "A name of the served model.", default=DEFAULT_NAME)
    name: str | None = accepts(OllamaModelNameField(), "The older name of `model`.")
    verbose: bool = accepts(Bool(), "Without effect.", default=False)


OLLAMA_SHOW_BODY = ObjectOf(OllamaShowBody)


@dataclass(frozen=True, slots=True)
class OllamaKnownModel:
    """Of a model of any kind."""

    name: str
    family: str
    level: str  # how strongly it is quantised
    size: int
    context: int
    created: int

    @classmethod
    def known(cls, status: ModelStatus, served: AnyServedModel | None) -> OllamaKnownModel:
        return cls(status.name, "", "", status.claimed, 0, 0) if served is None else cls.of(served.card)

    @classmethod
    def of(cls, card: ModelCard | TaskCard) -> OllamaKnownModel:
        level = card.quantization or card.dtype if isinstance(card, ModelCard) else card.dtype
        return cls(card.name, card.family, level, card.weight_bytes, card.context, card.created)

    @property
    def digest(self) -> str:
        return sha256(f"{self.name}\n{self.family}\n{self.level}\n{self.size}".encode()).hexdigest()

    @property
    def details(self) -> OllamaDetails:
        return OllamaDetails("", "mlx", self.family, [self.family], "", self.level)

    @property
    def since(self) -> str:
        return datetime.fromtimestamp(self.created, UTC).isoformat().replace("+00:00", "Z")


def ollama_version_body() -> OllamaVersion:
    return OllamaVersion(OLLAMA_VERSION, __version__)


def ollama_tags(models: Iterable[tuple[ModelStatus, AnyServedModel | None]]) -> OllamaTags:
    """All models, loaded or not."""
    known = [OllamaKnownModel.known(status, served) for status, served in models]
    return OllamaTags([OllamaListed(one.name, one.name, one.since, one.size, one.digest, one.details) for one in known])


def ollama_running(models: Iterable[tuple[ModelStatus, AnyServedModel | None]]) -> OllamaRunning:
    """Those that are loaded, or on their way."""
    return OllamaRunning(
        [
            _running_model(status, OllamaKnownModel.known(status, served))
            for status, served in models
            if status.state not in ("unloaded", "failed")
        ]
    )


def _running_model(status: ModelStatus, one: OllamaKnownModel) -> OllamaLoaded:
    expires = NEVER_EXPIRES
    if status.expires_s is not None:
        until = datetime.now(UTC) + timedelta(seconds=status.expires_s)
        expires = until.isoformat().replace("+00:00", "Z")
    held = status.claimed or one.size
    return OllamaLoaded(
        *(one.name, one.name, one.size, one.digest, one.details, expires, held, one.context, status.state),
        UNSET if status.progress is None else round(status.progress, 3),
    )


def show_ollama_model(value: Any, served: AnyServedModel) -> OllamaShown:
    """What does not generate has no template and no parameters."""
    reading = served.reading()
    OLLAMA_SHOW_BODY.parse(value, "", reading)
    one, card = OllamaKnownModel.of(served.card), served.card
    template, sampling, further, able = "", {}, dict[str, int](), list[OllamaCapability]()
    if isinstance(served, ServedModel):
        template = "" if served.tokenizer.template is None else served.tokenizer.template.source
        sampling, able = sampling_body(served.sampling), ollama_capabilities(served)
        further = {f"{one.family}.vocab_size": served.card.vocab}
    elif isinstance(card, PoolingModelCard) and card.role == "embedding":
        further, able = {f"{one.family}.embedding_length": card.dimension}, ["embedding"]
    return OllamaShown(
        modelfile="",
        parameters="\n".join(f"{OLLAMA_OPTION_NAMES.get(name, name)} {value}" for name, value in sampling.items()),
        template=template,
        details=one.details,
        model_info={
            "general.architecture": one.family,
            "general.file_type": one.level,
            f"{one.family}.context_length": one.context,
            **further,
        },
        capabilities=able,
        modified_at=one.since,
        ingot=IgnoredNote.of(reading),
    )


def ollama_capabilities(served: ServedModel) -> list[OllamaCapability]:
    found: list[OllamaCapability] = ["completion"]
    if served.tokenizer.template is not None and served.format.can_call:
        found.append("tools")
    if served.tokenizer.infill is not None:
        found.append("insert")
    if model_thinks(served, served.format):
        found.append("thinking")
    if served.terms.media.kinds:
        found.append("vision")
    return found
