"""What the wire knows of the served model: its names, its tokenizer, and the terms that bodies are read under."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, cast

from ingot.config import Settings
from ingot.engine.model_card import ModelCard
from ingot.engine.request import LoraRef, Sampling
from ingot.engine.speech_request import HearingCard
from ingot.errors import ConfigError
from ingot.media.processor import Processor
from ingot.protocol.chat.sampling_defaults import sampling_body, sampling_defaults
from ingot.protocol.chat.sealing import ThinkingSeal
from ingot.protocol.model_names import DEFAULT_NAME, check_aliases, with_aliases
from ingot.protocol.side_served import SideServed, encoder_terms, hearing_terms, speaking_terms
from ingot.protocol.terms import MediaTerms, Terms
from ingot.text.chat_template.sandbox import TemplateHistory
from ingot.text.grammar.grammars import Grammars
from ingot.text.prompt.encoded import EncodedTexts
from ingot.text.prompt.remembered import RememberedAnswers
from ingot.text.tool_formats.format import Format
from ingot.text.tool_formats.registry import FormatSource, FoundFormat, format_named, found_format, thinking_named
from ingot.version import __version__

if TYPE_CHECKING:
    from ingot.engine.encoder_request import Role
    from ingot.engine.pooling_batches import OfferedEncoder
    from ingot.engine.text_to_speech import OfferedSpeech
    from ingot.text.tokenizer.tokenizer import Tokenizer

Secret = Callable[[], bytes]
"""May have to look for it, and so take a moment: not for an event loop."""
# What a template reads that is no request's to say.
TEMPLATE_OWN = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token", "sep_token"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served(SideServed):
    """A model that generates, with those that serve beside it."""

    card: ModelCard
    tokenizer: Tokenizer
    fingerprint: str
    format: Format  # how the model writes thinking and calls
    grammars: Grammars
    thinking: bool | None = None  # what holds where a request says nothing; None: what the template does
    thinking_budget: int | None = None
    sampling: Sampling = field(default_factory=Sampling)  # how tokens are chosen, where a request says nothing
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template, likewise
    history: TemplateHistory = "stable"  # how past turns are rendered, where a request says nothing
    trusting: bool = False  # control tokens are tokens in messages too, not only where the template writes them
    answers: RememberedAnswers = field(
        default_factory=RememberedAnswers
    )  # what was generated, for the turns that follow
    encodings: EncodedTexts = field(default_factory=EncodedTexts)  # what was encoded, for the same
    secret: Secret = field(default_factory=lambda: passing_secret(), repr=False)  # what thinking is signed with
    keeps_prefixes: bool = True
    holds_calls: bool = True  # that models begin by themselves, to their schemas, where a request says nothing
    format_source: FormatSource = "template"  # what told the format
    processor: Processor | None = None  # how the model is shown pictures and clips, where it is

    @classmethod
    def of(
        cls,
        card: ModelCard,
        tokenizer: Tokenizer,
        settings: Settings,
        encoders: Mapping[Role, OfferedEncoder] | None = None,
        processor: Processor | None = None,
        hearing: HearingCard | None = None,
        speaking: OfferedSpeech | None = None,
    ) -> Served:
        """`processor` is that of a model with a vision tower."""
        shown = None if settings.text_only else processor
        template = tokenizer.template
        names = tuple(dict.fromkeys((card.name, *settings.served_model_name, DEFAULT_NAME)))
        further = [one.card.name for one in (encoders or {}).values()] + ([] if hearing is None else [hearing.name])
        further += [] if speaking is None else [speaking.card.name]
        check_aliases(settings.alias, (*names, *further))
        terms = Terms(
            models=with_aliases(names, settings.alias),
            vocab=card.vocab,
            timeout_s=settings.request_timeout_s,
            strict=settings.strict,
            proposers=card.proposers,
            media=MediaTerms(
                () if shown is None else tuple(shown.placeholders),
                settings.media_hosts,
                withheld=processor is not None and shown is None,
            ),
            encoders=encoder_terms(encoders or {}, settings),
            hearing=hearing_terms(hearing, settings),
            speaking=speaking_terms(speaking, settings),
            template_variables=tuple(sorted(template.variables - TEMPLATE_OWN)) if template is not None else (),
        )
        sampling = sampling_defaults(card.recommended, settings.override_generation_config)
        found = format_of(card, tokenizer, settings)
        return cls(
            card=card,
            tokenizer=tokenizer,
            terms=terms,
            fingerprint=fingerprint(card, sampling),
            format=found.format,
            grammars=Grammars(tokenizer, card.vocab),
            thinking={"on": True, "off": False}.get(settings.thinking),
            thinking_budget=settings.thinking_budget,
            sampling=sampling,
            variables=default_variables(settings, terms),
            history=cast(TemplateHistory, settings.template_history),
            trusting=settings.trust_special_tokens,
            keeps_prefixes=settings.prefix_cache,
            holds_calls=settings.hold_calls,
            encoders=encoders or {},
            format_source=found.source,
            processor=shown,
            hearing=hearing,
            speaking=speaking,
        )

    def with_loras(self, loras: Mapping[str, LoraRef], default: str | None) -> Served:
        """With these adapters; `default` is the one of requests that name none."""
        return replace(self, terms=replace(self.terms, loras=loras, default_lora=default))

    @property
    def seal(self) -> ThinkingSeal:
        """Signs what the model thought, for clients to send back."""
        return ThinkingSeal.of(self.secret(), self.tenant)


def default_variables(settings: Settings, terms: Terms) -> dict[str, Any]:
    given = settings.default_chat_template_kwargs or {}
    for name in given:
        if name not in terms.template_variables:
            reads = ", ".join(terms.template_variables) or "none"
            raise ConfigError(
                f"default_chat_template_kwargs: the chat template reads no {name[:100]!r}; it reads: {reads}",
                param="default_chat_template_kwargs",
            )
    return given


def passing_secret() -> Secret:
    """One that lasts as long as the server."""
    made = secrets.token_bytes(32)
    return lambda: made


def format_of(card: ModelCard, tokenizer: Tokenizer, settings: Settings) -> FoundFormat:
    """As the settings say, else as the chat template shows."""
    source = tokenizer.template.source if tokenizer.template is not None else None
    found = found_format(source, card.family, tokenizer.response_template)
    if settings.tool_format is not None:
        named = replace(format_named(settings.tool_format), thinking=found.format.thinking)
        found = FoundFormat(named, "setting")
    if settings.thinking_format is not None:
        thinking = thinking_named(settings.thinking_format)
        found = replace(found, format=replace(found.format, thinking=thinking))
    return found


def fingerprint(card: ModelCard, sampling: Sampling) -> str:
    """Names the program and everything about the model that its output may depend on."""
    model = (card.name, card.source, card.family, card.dtype, card.device, str(card.weight_bytes))
    facts = (__version__, *model, str(sampling_body(sampling)))
    return "fp_" + blake2b("\n".join(facts).encode(), digest_size=6).hexdigest()
