"""What an answer tells of the prefix cache: how much was taken over, why no more, and where the prompt differs.

Texts are those of the asking tenant's own prompts: the engine reports no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import CacheReason, CacheReport, Timing
from ingot.protocol.chat.receipt_headers import MATCHED_HEADER, REASON_HEADER, TIMING_HEADERS
from ingot.text.chat_template.sandbox import TemplateHistory
from ingot.text.prompt.prompt import Prompt

if TYPE_CHECKING:
    from ingot.protocol.served import Served

ReceiptReason = CacheReason | Literal["template_rewrite"]
"""Why no more was taken over. `template_rewrite`: the chat template shows an earlier answer otherwise than it came."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a request's prompts were made of, to name places in them."""

    prompts: tuple[Prompt, ...]
    decode: Callable[[Sequence[int]], str]
    thinking: str | None = None  # what opens a model's thinking

    @classmethod
    def of(cls, served: Served, prompts: Sequence[Prompt | tuple[int, ...]]) -> Source:
        made = tuple(prompt if isinstance(prompt, Prompt) else Prompt(prompt, "") for prompt in prompts)
        tags = served.format.thinking
        tokenizer = served.tokenizer
        return cls(made, lambda ids: tokenizer.decode(ids, skip_special=False), tags.open if tags else None)


class Divergence(Struct):
    """Where the prompt and what was kept part: `character` counts in that message's own text, or in the whole
    prompt where it was no conversation. `ours` and `theirs` go on from there, a little."""

    message: int | None
    role: str | None
    character: int
    token: int
    ours: str
    theirs: str


class PromptReceipt(Struct):
    """One prompt's part in the receipt of a request that has several."""

    matched_tokens: int
    reason: ReceiptReason
    diverged: Divergence | None = None

    @classmethod
    def of(cls, report: CacheReport, number: int, source: Source | None) -> PromptReceipt:
        parted = divergence(report, number, source)
        rewritten = report.reason == "diverged" and parted is not None and is_rewrite(parted, source)
        return cls(report.matched, "template_rewrite" if rewritten else report.reason, parted)


class PromptNote(Struct):
    """How a conversation became a prompt: which rendering of past turns, how many past answers stand in it in the
    tokens they were generated in, and what was done to messages that the template does not take as they were."""

    history: TemplateHistory
    recalled: int
    adapted: list[str]

    @classmethod
    def of(cls, source: Source | None) -> PromptNote | UnsetType:
        if source is None or not source.prompts or not source.prompts[0].spans:
            return UNSET
        prompt = source.prompts[0]
        return cls(prompt.history, prompt.recalled, list(prompt.adapted))


class CacheReceipt(Struct):
    """`matched_tokens` of all prompts were taken over from `tier`; `reason` says why no more. `codec` is what they went
    through, or some of them: `raw` where they are as they were computed."""

    matched_tokens: int
    tier: Literal["ram", "disk"] | None
    codec: str | None
    reason: ReceiptReason | Literal["several"]
    diverged: Divergence | None = None
    prompts: list[PromptReceipt] | UnsetType = UNSET

    @classmethod
    def of(cls, reports: Sequence[CacheReport], source: Source | None) -> CacheReceipt | UnsetType:
        """UNSET for a request that ended before any of it ran."""
        if not reports:
            return UNSET
        each = [PromptReceipt.of(report, number, source) for number, report in enumerate(reports)]
        matched = sum(report.matched for report in reports)
        reasons = {one.reason for one in each}
        return cls(
            matched,
            min((report.tier for report in reports if report.tier is not None), default=None),  # disk before ram
            _codec([report for report in reports if report.matched]),
            reasons.pop() if len(reasons) == 1 else "several",
            each[0].diverged if len(each) == 1 else None,
            each if len(each) > 1 else UNSET,
        )


def _codec(reports: Sequence[CacheReport]) -> str | None:
    """Of several prompts', the one that is lossy, if one is."""
    return next((report.codec for report in reports if report.lossy), reports[0].codec if reports else None)


def divergence(report: CacheReport, number: int, source: Source | None) -> Divergence | None:
    if not report.theirs or source is None:
        return None
    place = source.prompts[number].place(report.known, source.decode)
    return Divergence(
        place.message,
        place.role or None,
        place.character,
        report.known,
        source.decode(report.ours),
        source.decode(report.theirs),
    )


def is_rewrite(parted: Divergence, source: Source | None) -> bool:
    """Whether one side has thinking where the other has none, in an answer that came from here."""
    if source is None or source.thinking is None or parted.role != "assistant":
        return False
    thinks = [side.lstrip().startswith(source.thinking) for side in (parted.ours, parted.theirs)]
    return thinks[0] != thinks[1]


def headers(cache: CacheReceipt | UnsetType, timing: Timing) -> list[tuple[str, str]]:
    seconds = (timing.queue, timing.prefill, timing.decode)
    told = [(name, f"{value:.6f}") for name, value in zip(TIMING_HEADERS, seconds, strict=True)]
    if cache is UNSET:
        return told
    return [(MATCHED_HEADER, str(cache.matched_tokens)), (REASON_HEADER, cache.reason), *told]
