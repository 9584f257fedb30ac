"""What Ollama's clients ask about models: `/api/tags`, `/api/ps`, `/api/show`, `/api/version`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType

from ingot.engine.encoder_request import EncoderCard
from ingot.engine.fleet_standing import ModelState, Standing
from ingot.engine.model_card import ModelCard
from ingot.engine.speaking.request import SpeakingCard
from ingot.engine.speech_request import HearingCard
from ingot.protocol.chat.answers import Note
from ingot.protocol.chat.sampling_defaults import sampling_body
from ingot.protocol.chat.thinking import thinks
from ingot.protocol.model_names import DEFAULT_NAME
from ingot.protocol.ollama.request import OllamaName
from ingot.protocol.schema.fields import Bool
from ingot.protocol.schema.objects import ObjectOf, accepts
from ingot.protocol.served import Served
from ingot.protocol.side_served import SideServed
from ingot.version import __version__

OLLAMA_VERSION: Final = "0.13.0"
"""The version of Ollama whose protocol this is: clients refuse to talk to old ones."""
OPTION_NAMES: Final = {"repetition_penalty": "repeat_penalty"}
NEVER: Final = "9999-12-31T23:59:59Z"

Capability = Literal["completion", "tools", "insert", "thinking", "vision", "embedding"]


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
    capabilities: list[Capability]
    modified_at: str
    ingot: Note | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowBody:
    model: str = accepts(OllamaName(), "A name of the served model.", default=DEFAULT_NAME)
    name: str | None = accepts(OllamaName(), "The older name of `model`.")
    verbose: bool = accepts(Bool(), "There is no more to tell.", default=False)


SHOW_BODY = ObjectOf(ShowBody)


@dataclass(frozen=True, slots=True)
class Known:
    """What is told of a model, whatever it is for."""

    name: str
    family: str
    level: str  # how strongly it is quantised
    size: int
    context: int
    created: int

    @classmethod
    def all(cls, served: Served) -> list[Known]:
        found = [cls.of(served.card), *(cls.of(one.card) for one in served.encoders.values())]
        return list({one.name: one for one in found}.values())

    @classmethod
    def of(cls, card: ModelCard | EncoderCard | HearingCard | SpeakingCard) -> Known:
        if isinstance(card, ModelCard):
            level = card.quantization or card.dtype
            return cls(card.name, card.family, level, card.weight_bytes, card.context, card.created)
        if isinstance(card, SpeakingCard):
            return cls(card.name, "kokoro", card.dtype, card.weight_bytes, card.context, card.created)
        if isinstance(card, HearingCard):
            return cls(card.name, "whisper", card.dtype, card.weight_bytes, card.context, card.created)
        return cls(card.name, card.family, card.dtype, card.weight_bytes, card.length, card.created)

    @classmethod
    def standing(cls, stands: Standing, served: SideServed | None) -> Known:
        if served is not None:
            return cls.of(served.card)
        return cls(stands.name, "", "", stands.claimed, 0, 0)

    @property
    def digest(self) -> str:
        return sha256(f"{self.name}\n{self.family}\n{self.level}\n{self.size}".encode()).hexdigest()

    @property
    def details(self) -> OllamaDetails:
        return OllamaDetails("", "mlx", self.family, [self.family], "", self.level)

    @property
    def since(self) -> str:
        return datetime.fromtimestamp(self.created, UTC).isoformat().replace("+00:00", "Z")


def version() -> OllamaVersion:
    return OllamaVersion(OLLAMA_VERSION, __version__)


def tags(served: Served) -> OllamaTags:
    return OllamaTags(
        [OllamaListed(one.name, one.name, one.since, one.size, one.digest, one.details) for one in Known.all(served)]
    )


def running(served: Served) -> OllamaRunning:
    """All of them, always: models stay loaded."""
    return OllamaRunning(
        [
            OllamaLoaded(one.name, one.name, one.size, one.digest, one.details, NEVER, one.size, one.context)
            for one in Known.all(served)
        ]
    )


def tags_of(standings: Iterable[tuple[Standing, SideServed | None]]) -> OllamaTags:
    """Of several models, loaded or not."""
    known = [Known.standing(stands, served) for stands, served in standings]
    return OllamaTags([OllamaListed(one.name, one.name, one.since, one.size, one.digest, one.details) for one in known])


def running_of(standings: Iterable[tuple[Standing, SideServed | None]]) -> OllamaRunning:
    """Those that are loaded, or on their way."""
    there = [(stands, served) for stands, served in standings if stands.state not in ("unloaded", "failed")]
    return OllamaRunning([_running(stands, Known.standing(stands, served)) for stands, served in there])


def _running(stands: Standing, one: Known) -> OllamaLoaded:
    expires = NEVER
    if stands.expires_s is not None:
        until = datetime.now(UTC) + timedelta(seconds=stands.expires_s)
        expires = until.isoformat().replace("+00:00", "Z")
    return OllamaLoaded(
        *(one.name, one.name, one.size, one.digest, one.details, expires, stands.claimed, one.context, stands.state),
        UNSET if stands.progress is None else round(stands.progress, 3),
    )


def show(value: Any, served: Served) -> OllamaShown:
    reading = served.reading()
    SHOW_BODY.parse(value, "", reading)
    one, template = Known.of(served.card), served.tokenizer.template
    return OllamaShown(
        modelfile="",
        parameters="\n".join(
            f"{OPTION_NAMES.get(name, name)} {value}" for name, value in sampling_body(served.sampling).items()
        ),
        template=template.source if template is not None else "",
        details=one.details,
        model_info={
            "general.architecture": one.family,
            "general.file_type": one.level,
            f"{one.family}.context_length": one.context,
            f"{one.family}.vocab_size": served.card.vocab,
        },
        capabilities=capabilities(served),
        modified_at=one.since,
        ingot=Note.of(reading),
    )


def show_side(value: Any, served: SideServed) -> OllamaShown:
    """Of a model that does not generate, which has no template and no parameters."""
    reading = served.reading()
    SHOW_BODY.parse(value, "", reading)
    one = Known.of(served.card)
    info = {"general.architecture": one.family, "general.file_type": one.level}
    return OllamaShown(
        modelfile="",
        parameters="",
        template="",
        details=one.details,
        model_info={**info, f"{one.family}.context_length": one.context, **vector_sizes(served, one.family)},
        capabilities=["embedding"] if "embedding" in served.encoders else [],
        modified_at=one.since,
        ingot=Note.of(reading),
    )


def vector_sizes(served: SideServed, family: str) -> dict[str, int]:
    encoder = served.encoders.get("embedding")
    return {} if encoder is None else {f"{family}.embedding_length": encoder.card.dimension}


def capabilities(served: Served) -> list[Capability]:
    found: list[Capability] = ["completion"]
    if served.tokenizer.template is not None and served.format.can_call:
        found.append("tools")
    if served.tokenizer.infill is not None:
        found.append("insert")
    if thinks(served, served.format):
        found.append("thinking")
    if served.terms.media.kinds:
        found.append("vision")
    return found
