"""Specprefill, prompts of which only the tokens that matter are computed: how a request asks for it, and what its
receipt says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal

from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import SpecPrefillReport, SpecPrefillRequest, SpecPrefillSkipped, Timing, TokenRange
from ingot.errors import BadRequest
from ingot.text.prompt.assembly import MessageSpan, Prompt

ABOUT_SPECPREFILL: Final = (
    "Compute of a prompt only what a smaller model finds to matter, however short it is: the first token comes sooner, "
    "and the answer is not the same. `false` forbids it. Needs a server that was started with `--specprefill`."
)
ABOUT_SPECPREFILL_KEEP: Final = (
    "The share of such a prompt that is computed, of what is not always. Without `specprefill` it asks for that where "
    "the prompt is as long as the server's `--specprefill-threshold`."
)
SPECPREFILL_RULES: Final = frozenset({"system", "developer"})
"""Roles whose messages are computed whole."""
WHOLE_TURN: Final = 512
"""The newest turn is computed whole, unless it is longer than this: then its ends are."""
TURN_BEGIN, TURN_END = 64, 256


def specprefill_ask(
    wanted: bool | None, keep: float | None, prompts: Sequence[Prompt | tuple[int, ...]], *, prefix: str = ""
) -> SpecPrefillRequest | None:
    """What a body says, as the engine takes it: `wanted` true is for any prompt, a share alone for long ones. Raises
    BadRequest where one forbids what the other asks for."""
    if wanted is False and keep is not None:
        raise BadRequest(
            f"{prefix}specprefill_keep_pct says how much specprefill keeps, and {prefix}specprefill is false: choose "
            "one.",
            param=f"{prefix}specprefill_keep_pct",
        )
    if not wanted and keep is None:
        return None
    whole = tuple(tuple(_whole_turns(prompt.spans)) if isinstance(prompt, Prompt) else () for prompt in prompts)
    return SpecPrefillRequest(keep, whole, forced=wanted is True)


def _whole_turns(spans: Sequence[MessageSpan]) -> Iterator[TokenRange]:
    """What is computed in any case: rules and tools, which stand in system messages or in what the template adds, and
    all that came after the last answer."""
    for span in spans:
        if span.message is None or span.role in SPECPREFILL_RULES:
            yield span.begin, span.end
    begin = max((span.end for span in spans if span.role == "assistant" and span.message is not None), default=0)
    newest = [
        span
        for span in spans
        if span.begin >= begin and span.message is not None and span.role not in SPECPREFILL_RULES
    ]
    for span in newest:
        if span.end - span.begin <= WHOLE_TURN:
            yield span.begin, span.end
        else:
            yield span.begin, span.begin + TURN_BEGIN
            yield span.end - TURN_END, span.end


class SpecprefillReceipt(Struct):
    """`scored` tokens were judged, `kept` of them computed; seconds of both. The first `reused` tokens of the prompt
    stayed as an earlier request left them. Or `reason`, why all were computed."""

    scorer: str
    scored: int | UnsetType = UNSET
    kept: int | UnsetType = UNSET
    scoring_s: float | UnsetType = UNSET
    computing_s: float | UnsetType = UNSET
    reused: int | UnsetType = UNSET
    reason: SpecPrefillSkipped | Literal["several"] | UnsetType = UNSET

    @classmethod
    def of(cls, reports: Sequence[SpecPrefillReport], timing: Timing) -> SpecprefillReceipt | UnsetType:
        """UNSET where nobody asked."""
        if not reports:
            return UNSET
        scorer, used = reports[0].scorer, [report for report in reports if report.unused is None]
        if not used:
            reasons = {report.unused for report in reports if report.unused is not None}
            return cls(scorer, reason=reasons.pop() if len(reasons) == 1 else "several")
        scoring = sum(report.scoring_s for report in used)
        return cls(
            scorer,
            sum(report.scored for report in used),
            sum(report.kept for report in used),
            round(scoring, 6),
            round(max(0.0, timing.prefill - scoring), 6),
            sum(report.reused for report in used) or UNSET,
        )
