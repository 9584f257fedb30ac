"""Specprefill computes only the tokens of a prompt that matter: its request fields, and its part of the receipt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal

from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import SpecPrefillReport, SpecPrefillRequest, SpecPrefillSkipped, Timing, TokenRange
from ingot.errors import BadRequest
from ingot.text.prompt.assembly import MessageSpan, Prompt

ABOUT_SPECPREFILL: Final = (
    "Compute only the prompt tokens that a smaller model scores highest, however short the prompt is: the first token "
    "comes sooner, and the answer is not the same. `false` forbids it, also where the server does it by itself "
    "(`--specprefill auto`). `true` needs a server started with `--specprefill`."
)
ABOUT_SPECPREFILL_KEEP: Final = (
    "The share of the scored tokens that is computed. Without `specprefill` it applies to prompts of at least the "
    "server's `--specprefill-threshold`."
)
SPECPREFILL_RULES: Final = frozenset({"system", "developer"})
"""Roles whose messages are computed whole."""
WHOLE_TURN: Final = 512
"""The newest turn is computed whole, unless it is longer than this: then its ends are."""
TURN_BEGIN, TURN_END = 64, 256


def specprefill_ask(
    enabled: bool | None,
    keep: float | None,
    prompts: Sequence[Prompt | tuple[int, ...]],
    *,
    auto_from: int | None = None,
    prefix: str = "",
) -> SpecPrefillRequest | None:
    """The engine's options: `enabled` is for any prompt, a share alone for long ones. A request with neither is left to
    the server's policy if one of its prompts has `auto_from` tokens. Raises BadRequest where the two contradict each
    other."""
    if enabled is False and keep is not None:
        raise BadRequest(
            f"{prefix}specprefill_keep_pct is set, and {prefix}specprefill is false: choose one.",
            param=f"{prefix}specprefill_keep_pct",
        )
    auto = enabled is None and keep is None and auto_from is not None and _longest(prompts) >= auto_from
    if not enabled and keep is None and not auto:
        return None
    whole = tuple(tuple(_whole_turns(prompt.spans)) if isinstance(prompt, Prompt) else () for prompt in prompts)
    return SpecPrefillRequest(keep, whole, forced=enabled is True, auto=auto)


def _longest(prompts: Sequence[Prompt | tuple[int, ...]]) -> int:
    return max((len(each.tokens if isinstance(each, Prompt) else each) for each in prompts), default=0)


def _whole_turns(spans: Sequence[MessageSpan]) -> Iterator[TokenRange]:
    """What is always computed: instructions and tools, which are in system messages or in what the template adds, and
    everything after the last answer."""
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
    """`scored` tokens were scored and `kept` of them computed; seconds of both. The first `reused` tokens of the prompt
    came from an earlier request. `mass` is the share of the scorer's attention that was kept, where it attends; `auto`
    that the server's policy decided, not the request. Or `reason`, why all were computed."""

    scorer: str
    scored: int | UnsetType = UNSET
    kept: int | UnsetType = UNSET
    scoring_s: float | UnsetType = UNSET
    computing_s: float | UnsetType = UNSET
    reused: int | UnsetType = UNSET
    reason: SpecPrefillSkipped | Literal["several"] | UnsetType = UNSET
    share: float | UnsetType = UNSET
    mass: float | UnsetType = UNSET
    auto: bool | UnsetType = UNSET

    @classmethod
    def of(cls, reports: Sequence[SpecPrefillReport], timing: Timing) -> SpecprefillReceipt | UnsetType:
        """UNSET where it was not requested."""
        if not reports:
            return UNSET
        auto = any(report.auto for report in reports) or UNSET
        scorer, used = reports[0].scorer, [report for report in reports if report.unused is None]
        if not used:
            reasons = {report.unused for report in reports if report.unused is not None}
            return cls(scorer, reason=reasons.pop() if len(reasons) == 1 else "several", auto=auto)
        scoring, masses = (
            sum(report.scoring_s for report in used),
            [each.mass for each in used if each.mass is not None],
        )
        scored, kept = sum(report.scored for report in used), sum(report.kept for report in used)
        return cls(
            scorer,
            scored,
            kept,
            round(scoring, 6),
            round(max(0.0, timing.prefill - scoring), 6),
            sum(report.reused for report in used) or UNSET,
            share=round(kept / scored, 4) if scored else UNSET,
            mass=round(min(masses), 4) if masses else UNSET,
            auto=auto,
        )
