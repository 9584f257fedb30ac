"""Whole answers: thinking, which is free up to a budget, forced text, and then what a grammar says.

The matchers here need no grammar of their own: forced tokens, thinking, what may stand around them, and several
matchers at once or one after another. `compose_answer_grammar` puts a request's answer together from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.text.grammar.compiled import RollbackMatcher
from ingot.text.grammar.matcher import CompiledGrammar, GrammarMatcher, GrammarViolated, TokenMask
from ingot.text.grammar.vocabulary import SPACE_BYTES, GrammarVocabulary, allow_token, allows_token, forbid_token
from ingot.text.parser.parser import ThinkingStart
from ingot.text.tool_formats.format import Format, ThinkingFormat

SPACE_TOKENS = tuple(bytes((byte,)) for byte in SPACE_BYTES)
MOST_LEADING_SPACES = 4
"""Tokens of white space that may come between thinking and what is held to a plan."""
SPARE_CLOSING_TOKENS = 3
"""By which a budget may be exceeded, to finish a character."""


class ForcedTokensMatcher(RollbackMatcher):
    """These tokens and no others."""

    free = False

    def __init__(self, vocabulary: GrammarVocabulary, tokens: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._tokens = tokens
        self._at = 0

    @property
    def done(self) -> bool:
        return self._at == len(self._tokens)

    def mask(self) -> TokenMask | None:
        mask = self._vocabulary.nothing()
        if not self.done:
            allow_token(mask, self._tokens[self._at])
        return mask

    def accept(self, token: int) -> None:
        if self.done or token != self._tokens[self._at]:
            raise GrammarViolated("The answer did not go on with the text it was to go on with, and was given up.")
        self._at += 1

    def standing(self) -> int:
        return self._at

    def rollback(self, standing: int) -> None:
        self._at = standing


class ThinkingMatcher(RollbackMatcher):
    """Anything up to `close`; after `budget` tokens, `closing` is forced.

    Where the rest of the answer is held to something (`before_plan`), the answer cannot end here, nor may a token that
    writes the end of `close` go on with more than white space.
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        close: bytes,
        closing: Sequence[int],
        budget: int | None,
        *,
        before_plan: bool,
    ) -> None:
        self._vocabulary, self._close = vocabulary, close
        self._left = budget
        self._before_plan = before_plan
        self._written = b""  # its end: as much as may be the beginning of the tag, or half a character
        self._cut = ForcedTokensMatcher(vocabulary, closing)
        self._cutting = budget is not None and budget <= 0
        self._closed = False

    @property
    def free(self) -> bool:
        if self._closed:
            return not self._before_plan
        return not (self._before_plan or self._cutting) and (self._left is None or self._left >= 2)

    @property
    def done(self) -> bool:
        return self._closed

    def mask(self) -> TokenMask | None:
        if self._closed or not (self._before_plan or self._cutting):
            return None
        return self._cut.mask() if self._cutting else self._without_ends()

    def accept(self, token: int) -> None:
        if self._closed:
            return
        if self._cutting:
            self._cut.accept(token)
            self._closed = self._cut.done
            return
        self._written += self._vocabulary.tokens[token]
        self._closed = self._close in self._written
        self._written = self._written[-max(len(self._close) - 1, 4) :]
        if self._left is not None:
            self._left -= 1
            self._cutting = self._left <= 0 and (_ends_whole(self._written) or self._left <= -SPARE_CLOSING_TOKENS)

    @property
    def narrow(self) -> bool:
        return self._cutting

    def standing(self) -> Any:
        return self._left, self._written, self._cutting, self._closed, self._cut.standing()

    def rollback(self, standing: Any) -> None:
        self._left, self._written, self._cutting, self._closed, cut = standing
        self._cut.rollback(cut)

    def _without_ends(self) -> TokenMask:
        mask = self._vocabulary.unended.copy()
        for id in self._overshooting():
            forbid_token(mask, id)
        return mask

    def _overshooting(self) -> list[int]:
        """Tokens that would end the tag and go on with something else."""
        vocabulary, close = self._vocabulary, self._close
        sizes = [size for size in range(len(close)) if self._written.endswith(close[:size])]
        found = [
            id
            for size in sizes
            for id in vocabulary.beginning(close[size:])
            if vocabulary.tokens[id][len(close) - size :].strip(SPACE_BYTES)
        ]
        return found + [
            id for id in vocabulary.holding(close) if vocabulary.tokens[id].partition(close)[2].strip(SPACE_BYTES)
        ]


class SpacedMatcher(RollbackMatcher):
    """A guide before which some white space may come."""

    def __init__(self, vocabulary: GrammarVocabulary, guide: GrammarMatcher) -> None:
        self._vocabulary, self._guide = vocabulary, guide
        self._left = MOST_LEADING_SPACES

    @property
    def free(self) -> bool:
        return self._left == 0 and self._guide.free

    @property
    def done(self) -> bool:
        return self._guide.done

    def mask(self) -> TokenMask | None:
        mask = self._guide.mask()
        return (
            mask if mask is None or self._left == 0 else mask[: len(self._vocabulary.spaces)] | self._vocabulary.spaces
        )

    def accept(self, token: int) -> None:
        if self._left and allows_token(self._vocabulary.spaces, token) and not self._guide.admits(token):
            self._left -= 1
            return
        self._left = 0
        self._guide.accept(token)

    def admits(self, token: int) -> bool:
        return self._guide.admits(token) or (self._left > 0 and allows_token(self._vocabulary.spaces, token))

    @property
    def narrow(self) -> bool:
        return self._left == 0 and self._guide.narrow

    def standing(self) -> Any:
        return self._left, self._guide.standing()

    def rollback(self, standing: Any) -> None:
        self._left, own = standing
        self._guide.rollback(own)


class OptionalTagMatcher(RollbackMatcher):
    """The beginning of an answer that may open with `tag`: then it is `tagged`, else `untagged` or, without, free."""

    def __init__(
        self, vocabulary: GrammarVocabulary, tag: bytes, tagged: GrammarMatcher, untagged: GrammarMatcher | None
    ) -> None:
        self._vocabulary, self._tag = vocabulary, tag
        self._tagged, self._untagged = tagged, untagged
        self._held = untagged is not None
        self._written = b""
        self._chosen: GrammarMatcher | None = None
        self._undecided = True

    @property
    def free(self) -> bool:
        if not self._undecided:
            return self._chosen is None or self._chosen.free
        return not self._held and self._tagged.mask() is None

    @property
    def done(self) -> bool:
        return not self._undecided and self._chosen is not None and self._chosen.done

    def mask(self) -> TokenMask | None:
        if not self._undecided:
            return None if self._chosen is None else self._chosen.mask()
        if not self._held:
            return None
        mask = self._vocabulary.nothing()
        if self._untagged is not None and (own := self._untagged.mask()) is not None:
            mask |= own[: len(mask)]
        for id in self._vocabulary.leading_to(self._tag[len(self._written) :]):
            allow_token(mask, id)
        return mask

    def accept(self, token: int) -> None:
        if not self._undecided:
            if self._chosen is not None:
                self._chosen.accept(token)
            return
        self._written += self._vocabulary.tokens[token]
        if not self._tag.startswith(SPACE_TOKENS):
            self._written = self._written.lstrip(SPACE_BYTES)
        if self._written.startswith(self._tag):
            self._decide(self._tagged)
            return
        begun = self._tag.startswith(self._written)
        if self._untagged is not None and not _accepts(self._untagged, token):
            self._untagged = None
        if not begun and self._held and self._untagged is None:
            raise GrammarViolated("The answer began as nothing it was to begin as, and was given up.")
        if not begun:
            self._decide(self._untagged)

    def admits(self, token: int) -> bool:
        if self._undecided or self._chosen is None:
            return super().admits(token)
        return self._chosen.admits(token)

    @property
    def narrow(self) -> bool:
        return self._held if self._undecided else self._chosen is not None and self._chosen.narrow

    def standing(self) -> Any:
        untagged = self._untagged
        chosen = self._undecided, self._chosen, self._written
        return chosen, untagged, untagged and untagged.standing(), self._tagged.standing()

    def rollback(self, standing: Any) -> None:
        chosen, self._untagged, untagged, tagged = standing
        self._undecided, self._chosen, self._written = chosen
        if self._untagged is not None:
            self._untagged.rollback(untagged)
        self._tagged.rollback(tagged)

    def _decide(self, chosen: GrammarMatcher | None) -> None:
        self._undecided = False
        self._chosen = chosen


class AnyMatcher(RollbackMatcher):
    """What any of several guides allows, for as long as it goes on to."""

    free = False

    def __init__(self, vocabulary: GrammarVocabulary, guides: Sequence[GrammarMatcher]) -> None:
        self._vocabulary = vocabulary
        self._guides = list(guides)

    @property
    def done(self) -> bool:
        return all(guide.done for guide in self._guides)

    def mask(self) -> TokenMask | None:
        masks = [guide.mask() for guide in self._guides]
        either = self._vocabulary.nothing()
        for mask in masks:
            if mask is None:
                return None
            either |= mask[: len(either)]
        return either

    def accept(self, token: int) -> None:
        self._guides = [guide for guide in self._guides if _accepts(guide, token)]
        if not self._guides:
            raise GrammarViolated("The answer went on as nothing it was to go on as, and was given up.")

    def admits(self, token: int) -> bool:
        return any(guide.admits(token) for guide in self._guides)

    @property
    def narrow(self) -> bool:
        return all(guide.narrow for guide in self._guides)

    def standing(self) -> Any:
        return [(guide, guide.standing()) for guide in self._guides]

    def rollback(self, standing: Any) -> None:
        self._guides = [guide for guide, _ in standing]
        for guide, own in standing:
            guide.rollback(own)


class AllMatcher(RollbackMatcher):
    """What all of several guides allow. None of them ends the answer."""

    done = False

    def __init__(self, guides: Sequence[GrammarMatcher]) -> None:
        self._guides = guides

    @property
    def free(self) -> bool:
        return all(guide.free for guide in self._guides)

    def mask(self) -> TokenMask | None:
        masks = [mask for guide in self._guides if (mask := guide.mask()) is not None]
        size = min(map(len, masks), default=0)
        return np.bitwise_and.reduce([mask[:size] for mask in masks]) if masks else None

    def accept(self, token: int) -> None:
        for guide in self._guides:
            guide.accept(token)

    def admits(self, token: int) -> bool:
        return all(guide.admits(token) for guide in self._guides)

    @property
    def narrow(self) -> bool:
        return any(guide.narrow for guide in self._guides)

    def standing(self) -> Any:
        return [guide.standing() for guide in self._guides]

    def rollback(self, standing: Any) -> None:
        for guide, own in zip(self._guides, standing, strict=True):
            guide.rollback(own)


class MatcherChain(RollbackMatcher):
    """Guides one after another: the next begins where one is done. Behind the last, unless it `ends`, all is free."""

    def __init__(self, guides: Sequence[GrammarMatcher], *, ends: bool) -> None:
        self._guides = guides
        self._ends = ends
        self._at = 0
        self._advance()

    @property
    def free(self) -> bool:
        return self._at == len(self._guides) or self._guides[self._at].free

    @property
    def done(self) -> bool:
        return self._ends and self._at == len(self._guides) - 1 and self._guides[self._at].done

    def mask(self) -> TokenMask | None:
        return None if self._at == len(self._guides) else self._guides[self._at].mask()

    def accept(self, token: int) -> None:
        if self._at < len(self._guides):
            self._guides[self._at].accept(token)
            self._advance()

    def admits(self, token: int) -> bool:
        return self._at == len(self._guides) or self._guides[self._at].admits(token)

    @property
    def narrow(self) -> bool:
        return self._at < len(self._guides) and self._guides[self._at].narrow

    def standing(self) -> Any:
        return self._at, [guide.standing() for guide in self._guides]

    def rollback(self, standing: Any) -> None:
        self._at, each = standing
        for guide, own in zip(self._guides, each, strict=True):
            guide.rollback(own)

    def _advance(self) -> None:
        last = len(self._guides) - 1 if self._ends else len(self._guides)
        while self._at < last and self._guides[self._at].done:
            self._at += 1


def _accepts(guide: GrammarMatcher, token: int) -> bool:
    """Whether the token is for this guide, which then has accepted it."""
    if not guide.admits(token):
        return False
    guide.accept(token)
    return True


def _ends_whole(written: bytes) -> bool:
    """Whether the text does not end within a character."""
    for size in range(1, min(4, len(written) + 1)):
        byte = written[-size]
        if byte < 0x80:
            return True
        if byte >= 0xC0:
            return size >= (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return True


@dataclass(frozen=True, slots=True)
class CallAnswerGrammar:
    """A plan for answers that may be calls: it writes the headers of messages itself, where the format has any."""

    plan: CompiledGrammar

    def begin(self) -> GrammarMatcher:
        return self.plan.begin()


@dataclass(frozen=True, slots=True)
class ThinkingTokens:
    """How a thinking part is opened and closed, what we write to close it, and what has to follow it in any case."""

    open: bytes
    close: bytes
    closing: tuple[int, ...]
    bridge: tuple[int, ...] = ()

    @classmethod
    def of(cls, vocabulary: GrammarVocabulary, format: Format) -> ThinkingTokens | None:
        if (channels := format.channels) is not None:
            end = channels.ends[0]
            bridge = tuple(vocabulary.encode(channels.start + channels.role))
            return cls(channels.asides[0].encode(), end.encode(), tuple(vocabulary.encode(end)), bridge)
        if (thinking := format.thinking) is None:
            return None
        return cls(thinking.open.encode(), thinking.close.encode(), tuple(vocabulary.encode(closing_text(thinking))))


def closing_text(thinking: ThinkingFormat) -> str:
    """What we write to end a thinking part, as templates write it behind one."""
    return f"\n{thinking.close}\n\n"


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    vocabulary: GrammarVocabulary
    plan: CompiledGrammar | None
    calls: CompiledGrammar | None  # what may come instead of the plan's
    header: tuple[int, ...]  # of the message that the plan is for
    tags: ThinkingTokens | None  # None: no thinking
    opened: bool
    budget: int | None

    def begin(self) -> GrammarMatcher:
        if self.tags is None:
            return self._planned()
        thought = self._thought(self.tags)
        if self.opened:
            return thought
        return OptionalTagMatcher(self.vocabulary, self.tags.open, thought, self._planned() if self.plan else None)

    def _planned(self) -> GrammarMatcher:
        assert self.plan is not None
        header = [ForcedTokensMatcher(self.vocabulary, self.header)] if self.header else []
        answer = MatcherChain([*header, self.plan.begin()], ends=True)
        return AnyMatcher(self.vocabulary, [self.calls.begin(), answer]) if self.calls else answer

    def _thought(self, tags: ThinkingTokens) -> GrammarMatcher:
        vocabulary = self.vocabulary
        if self.plan is None:
            closing = (*tags.closing, *tags.bridge)
            return MatcherChain(
                [ThinkingMatcher(vocabulary, tags.close, closing, self.budget, before_plan=False)], ends=False
            )
        thinking = ThinkingMatcher(vocabulary, tags.close, tags.closing, self.budget, before_plan=True)
        if tags.bridge:
            return MatcherChain([thinking, ForcedTokensMatcher(vocabulary, tags.bridge), self._planned()], ends=True)
        return MatcherChain([thinking, SpacedMatcher(vocabulary, self._planned())], ends=True)


@dataclass(frozen=True, slots=True)
class CombinedGrammar:
    """Plans that hold at the same time."""

    plans: tuple[CompiledGrammar, ...]

    def begin(self) -> GrammarMatcher:
        return AllMatcher([plan.begin() for plan in self.plans])


def compose_answer_grammar(
    vocabulary: GrammarVocabulary,
    plan: CompiledGrammar | None,
    format: Format,
    start: ThinkingStart,
    *,
    calls: CompiledGrammar | None,
    budget: int | None,
    may_think: bool,
) -> CompiledGrammar | None:
    """See `Grammars.answer`."""
    if plan is None:
        plan, calls = calls, None
    opened = start is ThinkingStart.OPENED
    tags = ThinkingTokens.of(vocabulary, format) if opened or may_think else None
    if tags is not None:
        vocabulary.expect(tags.open, tags.close)
    if plan is None:
        return AnswerGrammar(vocabulary, None, None, (), tags, opened, budget) if tags and budget is not None else None
    headed = format.channels is None or isinstance(plan, CallAnswerGrammar)
    header = () if headed or format.channels is None else tuple(vocabulary.encode(format.channels.answer))
    alone = not (tags or header or calls)
    return plan if alone else AnswerGrammar(vocabulary, plan, calls, header, tags, opened, budget)
