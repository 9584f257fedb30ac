"""What the wire knows of the served model: its names, its tokenizer, and the terms that bodies are read under."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from ingot.config import Settings
from ingot.engine.request import ModelCard
from ingot.protocol.fields import Reading, Terms
from ingot.version import __version__

if TYPE_CHECKING:
    from ingot.text.tokenizer import Tokenizer

DEFAULT_NAME = "default"
# What a template reads that is no request's to say.
TEMPLATE_OWN = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token", "sep_token"}
)


@dataclass(frozen=True, slots=True)
class Served:
    card: ModelCard
    tokenizer: Tokenizer
    terms: Terms
    fingerprint: str

    @classmethod
    def of(cls, card: ModelCard, tokenizer: Tokenizer, settings: Settings) -> Served:
        template = tokenizer.template
        terms = Terms(
            models=tuple(dict.fromkeys((card.name, DEFAULT_NAME))),
            vocab=card.vocab,
            timeout_s=settings.request_timeout_s,
            strict=settings.strict,
            template_variables=tuple(sorted(template.variables - TEMPLATE_OWN)) if template is not None else (),
        )
        return cls(card, tokenizer, terms, fingerprint(card))

    def reading(self) -> Reading:
        return Reading(self.terms)


def fingerprint(card: ModelCard) -> str:
    """Names the program and everything about the model that its output may depend on."""
    facts = (__version__, card.name, card.source, card.family, card.dtype, card.device, str(card.weight_bytes))
    return "fp_" + blake2b("\n".join(facts).encode(), digest_size=6).hexdigest()
