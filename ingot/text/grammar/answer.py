"""Whole answers: thinking, which is free up to a budget, and then what a plan says."""

from __future__ import annotations

from dataclasses import dataclass

from ingot.text.grammar import parts
from ingot.text.grammar.matcher import Guide, GuidePlan
from ingot.text.grammar.vocabulary import Lexicon
from ingot.text.parser.parser import ThinkingStart
from ingot.text.tool_formats.format import Format, ThinkingFormat


@dataclass(frozen=True, slots=True)
class CallPlan:
    """A plan for answers that may be calls: it writes the headers of messages itself, where the format has any."""

    plan: GuidePlan

    def begin(self) -> Guide:
        return self.plan.begin()


@dataclass(frozen=True, slots=True)
class Tags:
    """How a thinking part is opened and closed, what we write to close it, and what has to follow it in any case."""

    open: bytes
    close: bytes
    closing: tuple[int, ...]
    bridge: tuple[int, ...] = ()

    @classmethod
    def of(cls, lexicon: Lexicon, format: Format) -> Tags | None:
        if (channels := format.channels) is not None:
            end = channels.ends[0]
            bridge = tuple(lexicon.encode(channels.start + channels.role))
            return cls(channels.asides[0].encode(), end.encode(), tuple(lexicon.encode(end)), bridge)
        if (thinking := format.thinking) is None:
            return None
        return cls(thinking.open.encode(), thinking.close.encode(), tuple(lexicon.encode(closing_text(thinking))))


def closing_text(thinking: ThinkingFormat) -> str:
    """What we write to end a thinking part, as templates write it behind one."""
    return f"\n{thinking.close}\n\n"


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    lexicon: Lexicon
    plan: GuidePlan | None
    calls: GuidePlan | None  # what may come instead of the plan's
    header: tuple[int, ...]  # of the message that the plan is for
    tags: Tags | None  # None: no thinking
    opened: bool
    budget: int | None

    def begin(self) -> Guide:
        if self.tags is None:
            return self._planned()
        thought = self._thought(self.tags)
        if self.opened:
            return thought
        return parts.OpeningGuide(self.lexicon, self.tags.open, thought, self._planned() if self.plan else None)

    def _planned(self) -> Guide:
        assert self.plan is not None
        header = [parts.ForcedTokens(self.lexicon, self.header)] if self.header else []
        answer = parts.GuideChain([*header, self.plan.begin()], ends=True)
        return parts.AnyGuide(self.lexicon, [self.calls.begin(), answer]) if self.calls else answer

    def _thought(self, tags: Tags) -> Guide:
        lexicon = self.lexicon
        if self.plan is None:
            closing = (*tags.closing, *tags.bridge)
            return parts.GuideChain(
                [parts.ThinkingGuide(lexicon, tags.close, closing, self.budget, before_plan=False)], ends=False
            )
        thinking = parts.ThinkingGuide(lexicon, tags.close, tags.closing, self.budget, before_plan=True)
        if tags.bridge:
            return parts.GuideChain([thinking, parts.ForcedTokens(lexicon, tags.bridge), self._planned()], ends=True)
        return parts.GuideChain([thinking, parts.SpacedGuide(lexicon, self._planned())], ends=True)


@dataclass(frozen=True, slots=True)
class AllPlans:
    """Plans that hold at the same time."""

    plans: tuple[GuidePlan, ...]

    def begin(self) -> Guide:
        return parts.AllGuides([plan.begin() for plan in self.plans])


def composed(
    lexicon: Lexicon,
    plan: GuidePlan | None,
    format: Format,
    start: ThinkingStart,
    *,
    calls: GuidePlan | None,
    budget: int | None,
    may_think: bool,
) -> GuidePlan | None:
    """See `Grammars.answer`."""
    if plan is None:
        plan, calls = calls, None
    opened = start is ThinkingStart.OPENED
    tags = Tags.of(lexicon, format) if opened or may_think else None
    if tags is not None:
        lexicon.expect(tags.open, tags.close)
    if plan is None:
        return AnswerPlan(lexicon, None, None, (), tags, opened, budget) if tags and budget is not None else None
    headed = format.channels is None or isinstance(plan, CallPlan)
    header = () if headed or format.channels is None else tuple(lexicon.encode(format.channels.answer))
    alone = not (tags or header or calls)
    return plan if alone else AnswerPlan(lexicon, plan, calls, header, tags, opened, budget)
