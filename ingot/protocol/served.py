"""What the wire knows of a served model: its card, its names, its tokenizer, its defaults, and the terms that bodies
are read under.

Made once when a model is loaded and never changed: a change (LoRA adapters, say) makes a new one. `ThinkingSeal` signs
thinking that clients send back (`encrypted_content`, `signature`). It is signed and compressed, not secret: whoever
holds it was given the thinking in plain text too. The signature proves that the thinking is word for word what a model
here produced, for the same tenant.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, cast

from ingot.config import Settings
from ingot.engine.request import LoraRef, ModelCard, PoolingModelCard, Sampling
from ingot.engine.speech_request import SpeechToTextCard, TextToSpeechCard
from ingot.errors import ConfigError
from ingot.media.layout import MediaProcessor
from ingot.protocol.chat.sampling_defaults import sampling_body, sampling_defaults
from ingot.protocol.schema.fields import BodyReading
from ingot.protocol.terms import (
    DEFAULT_NAME,
    MediaTerms,
    TaskTerms,
    Terms,
    with_alias_names,
)
from ingot.text.chat_template.sandbox import TemplateHistory
from ingot.text.grammar.grammars import Grammars
from ingot.text.prompt.answer_cache import AnswerCache
from ingot.text.prompt.assembly import EncodingCache
from ingot.text.tokenizer.encoder_inputs import TextInputs
from ingot.text.tool_formats.format import Format
from ingot.text.tool_formats.registry import FormatSource, FoundFormat, find_format, format_by_name, thinking_by_name
from ingot.version import __version__

if TYPE_CHECKING:
    from ingot.engine.pooling import ServedPoolingModel
    from ingot.engine.speech_to_text import ServedSpeechToText
    from ingot.engine.text_to_speech import ServedTextToSpeech
    from ingot.text.tokenizer.tokenizer import Tokenizer


SEAL_VERSION: Final = "ingot1."
SIGNATURE_BYTES: Final = 24


@dataclass(frozen=True, slots=True)
class ThinkingSeal:
    """Made from the server's secret and the tenant's name, so that no tenant can use what another was given."""

    key: bytes

    @classmethod
    def of(cls, secret: bytes, tenant: str) -> ThinkingSeal:
        return cls(hmac.digest(secret, b"reasoning\0" + tenant.encode(), "sha256"))

    def close(self, text: str) -> str:
        packed = zlib.compress(text.encode())
        return SEAL_VERSION + base64.urlsafe_b64encode(self._signature(packed) + packed).decode()

    def open(self, sealed: str) -> str | None:
        """The text; None where `sealed` is not what `close` made with the same key."""
        try:
            raw = base64.b64decode(sealed.removeprefix(SEAL_VERSION), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        signature, packed = raw[:SIGNATURE_BYTES], raw[SIGNATURE_BYTES:]
        if not sealed.startswith(SEAL_VERSION) or not hmac.compare_digest(signature, self._signature(packed)):
            return None
        return zlib.decompress(packed).decode()

    def _signature(self, packed: bytes) -> bytes:
        return hmac.digest(self.key, packed, "sha256")[:SIGNATURE_BYTES]


TaskCard = PoolingModelCard | SpeechToTextCard | TextToSpeechCard


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTaskModel:
    """A model that does one task and does not generate: embedding, reranking, transcription or speech. `loaded` is what
    its engine has loaded, of which readers use what does not touch mlx."""

    card: TaskCard
    terms: Terms
    loaded: ServedPoolingModel | ServedSpeechToText | ServedTextToSpeech
    tenant: str = ""  # to whom it is served

    @classmethod
    def of(
        cls,
        loaded: ServedPoolingModel | ServedSpeechToText | ServedTextToSpeech,
        settings: Settings,
        *,
        unloads: bool = False,
    ) -> ServedTaskModel:
        """Under all names that the settings give it."""
        card = loaded.card
        own = tuple(dict.fromkeys((card.name, *settings.served_model_name, DEFAULT_NAME)))
        names = with_alias_names(own, settings.alias)
        task = TaskTerms(names)
        if isinstance(card, PoolingModelCard):
            inputs = cast("ServedPoolingModel", loaded).inputs
            prompts = tuple(inputs.prompts) if isinstance(inputs, TextInputs) else ()
            task = replace(task, vocab=card.vocab, dimension=card.dimension, prompts=prompts)
        elif isinstance(card, SpeechToTextCard):
            task = replace(task, languages=card.languages, translates=card.translates)
        else:
            task = replace(task, voices=card.voices)
        timeout, strict = settings.request_timeout_s, settings.strict
        terms = Terms(names, 1, timeout, strict, tasks={card.kind: task}, unloads=unloads)
        return cls(card=card, terms=terms, loaded=loaded)

    def reading(self) -> BodyReading:
        return BodyReading(self.terms)


SecretSource = Callable[[], bytes]
"""May have to look for it, and so take a moment: not for an event loop."""
# Variables of a template that no request may set.
TEMPLATE_OWN_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token", "sep_token"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that generates."""

    card: ModelCard
    terms: Terms
    tenant: str = ""  # to whom; what is remembered of one tenant's requests is no other's
    tokenizer: Tokenizer
    fingerprint: str
    format: Format  # how the model writes thinking and calls
    grammars: Grammars
    thinking: bool | None = None  # what holds where a request says nothing; None: what the template does
    thinking_budget: int | None = None
    max_tokens: int | None = None  # of an answer, likewise
    sampling: Sampling = field(default_factory=Sampling)  # how tokens are chosen, where a request says nothing
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template, likewise
    history: TemplateHistory = "stable"  # how past turns are rendered, where a request says nothing
    trusting: bool = False  # control tokens are tokens in messages too, not only where the template writes them
    answers: AnswerCache = field(default_factory=AnswerCache)  # what was generated, for the turns that follow
    encodings: EncodingCache = field(default_factory=EncodingCache)  # what was encoded, for the same
    secret: SecretSource = field(default_factory=lambda: temporary_secret(), repr=False)  # what thinking is signed with
    prefix_cache_on: bool = True
    holds_tool_calls: bool = True  # that models begin by themselves, to their schemas, where a request says nothing
    loop_guard: bool = True  # ends answers that repeat themselves without end, likewise
    format_source: FormatSource = "template"  # where the format was found
    processor: MediaProcessor | None = None  # how images and video become its input, where they do

    @classmethod
    def of(
        cls,
        card: ModelCard,
        tokenizer: Tokenizer,
        settings: Settings,
        processor: MediaProcessor | None = None,
    ) -> ServedModel:
        """`processor` is that of a model with a vision tower."""
        shown = None if settings.text_only else processor
        template = tokenizer.template
        names = tuple(dict.fromkeys((card.name, *settings.served_model_name, DEFAULT_NAME)))
        terms = Terms(
            models=with_alias_names(names, settings.alias),
            vocab=card.vocab,
            timeout_s=settings.request_timeout_s,
            strict=settings.strict,
            proposers=card.proposers,
            media=MediaTerms(
                () if shown is None else tuple(shown.placeholders),
                settings.media_hosts,
                withheld=processor is not None and shown is None,
            ),
            template_variables=tuple(sorted(template.variables - TEMPLATE_OWN_VARIABLES))
            if template is not None
            else (),
        )
        sampling = sampling_defaults(card.recommended, settings.override_generation_config)
        found = answer_format_of(card, tokenizer, settings)
        return cls(
            card=card,
            tokenizer=tokenizer,
            terms=terms,
            fingerprint=system_fingerprint(card, sampling),
            format=found.format,
            grammars=Grammars(tokenizer, card.vocab),
            thinking={"on": True, "off": False}.get(settings.thinking),
            thinking_budget=settings.thinking_budget,
            max_tokens=settings.max_tokens,
            sampling=sampling,
            variables=default_variables(settings, terms),
            history=cast(TemplateHistory, settings.template_history),
            trusting=settings.trust_special_tokens,
            prefix_cache_on=settings.prefix_cache,
            holds_tool_calls=settings.hold_calls,
            loop_guard=settings.loop_guard,
            format_source=found.source,
            processor=shown,
        )

    def reading(self) -> BodyReading:
        return BodyReading(self.terms)

    def with_loras(self, loras: Mapping[str, LoraRef], default: str | None) -> ServedModel:
        """With these adapters; `default` is the one of requests that name none."""
        return replace(self, terms=replace(self.terms, loras=loras, default_lora=default))

    @property
    def seal(self) -> ThinkingSeal:
        """Signs what the model thought, for clients to send back."""
        return ThinkingSeal.of(self.secret(), self.tenant)


AnyServedModel = ServedModel | ServedTaskModel


def default_variables(settings: Settings, terms: Terms) -> dict[str, Any]:
    variables = settings.default_chat_template_kwargs or {}
    for name in variables:
        if name not in terms.template_variables:
            reads = ", ".join(terms.template_variables) or "none"
            raise ConfigError(
                f"default_chat_template_kwargs: the chat template reads no {name[:100]!r}; it reads: {reads}",
                param="default_chat_template_kwargs",
            )
    return variables


def temporary_secret() -> SecretSource:
    """One that lasts as long as the server."""
    made = secrets.token_bytes(32)
    return lambda: made


def answer_format_of(card: ModelCard, tokenizer: Tokenizer, settings: Settings) -> FoundFormat:
    """As the settings say, else as the chat template shows."""
    source = tokenizer.template.source if tokenizer.template is not None else None
    found = find_format(source, card.family, tokenizer.response_template)
    if settings.tool_format is not None:
        named = replace(format_by_name(settings.tool_format), thinking=found.format.thinking)
        found = FoundFormat(named, "setting")
    if settings.thinking_format is not None:
        thinking = thinking_by_name(settings.thinking_format)
        found = replace(found, format=replace(found.format, thinking=thinking))
    return found


def system_fingerprint(card: ModelCard, sampling: Sampling) -> str:
    """Names the program and everything about the model that its output may depend on."""
    model = (card.name, card.source, card.family, card.formats, card.arithmetic, card.device, card.weights)
    policy = () if card.specprefill_from is None else (f"specprefill from {card.specprefill_from}",)
    facts = (__version__, *model, *card.lossy, *policy, str(sampling_body(sampling)))
    return "fp_" + blake2b("\n".join(facts).encode(), digest_size=6).hexdigest()
