"""Whole answers: thinking, which is free up to a budget, forced text, and then what a grammar allows.

The matchers here need no grammar of their own: forced tokens, thinking, what may stand around them, and several
matchers at once or one after another. `compose_answer_grammar` puts a request's answer together from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.text.grammar.matcher import CompiledGrammar, GrammarMatcher, GrammarViolated, TokenMask, allows_token
from ingot.text.grammar.vocabulary import SPACE_BYTES, GrammarVocabulary, allow_token, forbid_token
from ingot.text.parser.parser import ThinkingStart
from ingot.text.tool_formats.format import Format

SPACE_TOKENS = tuple(bytes((byte,)) for byte in SPACE_BYTES)
MOST_LEADING_SPACES = 4  # tokens of white space that may come between thinking and what a grammar constrains
SPARE_CLOSING_TOKENS = 3  # tokens by which a budget may be exceeded, to finish a character


class ForcedTokensMatcher(GrammarMatcher):
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
            raise GrammarViolated("The answer did not go on with the text that was forced, and was ended.")
        self._at += 1


class ThinkingMatcher(GrammarMatcher):
    """Anything up to `close`; after `budget` tokens, `closing` is forced.

    Where a grammar follows (`before_grammar`), the answer cannot end here, nor may a token that writes the end of
    `close` go on with more than white space.
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        close: bytes,
        closing: Sequence[int],
        budget: int | None,
        *,
        before_grammar: bool,
    ) -> None:
        self._vocabulary, self._close = vocabulary, close
        self._left = budget
        self._before_grammar = before_grammar
        self._written = b""  # its end: as much as may be the beginning of the tag, or half a character
        self._cut = ForcedTokensMatcher(vocabulary, closing)
        self._cutting = budget is not None and budget <= 0
        self._closed = False

    def inner(self) -> Iterable[GrammarMatcher]:
        return (self._cut,)

    @property
    def free(self) -> bool:
        if self._closed:
            return not self._before_grammar
        return not (self._before_grammar or self._cutting) and (self._left is None or self._left >= 2)

    @property
    def done(self) -> bool:
        return self._closed

    def mask(self) -> TokenMask | None:
        if self._closed or not (self._before_grammar or self._cutting):
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

    def _without_ends(self) -> TokenMask:
        """All but the tokens that end the answer, or end the tag and go on with something else."""
        vocabulary, close, mask = self._vocabulary, self._close, self._vocabulary.unended.copy()
        for size in (size for size in range(len(close)) if self._written.endswith(close[:size])):
            for id in vocabulary.beginning(close[size:]):
                if vocabulary.tokens[id][len(close) - size :].strip(SPACE_BYTES):
                    forbid_token(mask, id)
        for id in vocabulary.holding(close):
            if vocabulary.tokens[id].partition(close)[2].strip(SPACE_BYTES):
                forbid_token(mask, id)
        return mask


class SpacedMatcher(GrammarMatcher):
    """A matcher before which some white space may come."""

    def __init__(self, vocabulary: GrammarVocabulary, matcher: GrammarMatcher) -> None:
        self._vocabulary, self._matcher = vocabulary, matcher
        self._left = MOST_LEADING_SPACES

    def inner(self) -> Iterable[GrammarMatcher]:
        return (self._matcher,)

    @property
    def free(self) -> bool:
        return self._left == 0 and self._matcher.free

    @property
    def done(self) -> bool:
        return self._matcher.done

    def mask(self) -> TokenMask | None:
        mask, spaces = self._matcher.mask(), self._vocabulary.spaces
        return mask if mask is None or self._left == 0 else mask[: len(spaces)] | spaces

    def accept(self, token: int) -> None:
        if self._left and allows_token(self._vocabulary.spaces, token) and not self._matcher.admits(token):
            self._left -= 1
            return
        self._left = 0
        self._matcher.accept(token)

    def admits(self, token: int) -> bool:
        return self._matcher.admits(token) or (self._left > 0 and allows_token(self._vocabulary.spaces, token))

    @property
    def narrow(self) -> bool:
        return self._left == 0 and self._matcher.narrow


class OptionalTagMatcher(GrammarMatcher):
    """The beginning of an answer that may open with `tag`: then it is `tagged`, else `untagged` or, without, free."""

    def __init__(
        self, vocabulary: GrammarVocabulary, tag: bytes, tagged: GrammarMatcher, untagged: GrammarMatcher | None
    ) -> None:
        self._vocabulary, self._tag = vocabulary, tag
        self._tagged, self._untagged = tagged, untagged
        self._constrained = untagged is not None
        self._written = b""
        self._chosen: GrammarMatcher | None = None
        self._undecided = True

    def inner(self) -> Iterable[GrammarMatcher]:
        return (self._tagged,) if self._untagged is None else (self._tagged, self._untagged)

    @property
    def free(self) -> bool:
        if not self._undecided:
            return self._chosen is None or self._chosen.free
        return not self._constrained and self._tagged.mask() is None

    @property
    def done(self) -> bool:
        return not self._undecided and self._chosen is not None and self._chosen.done

    def mask(self) -> TokenMask | None:
        if not self._undecided:
            return None if self._chosen is None else self._chosen.mask()
        if not self._constrained:
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
            self._undecided, self._chosen = False, self._tagged
            return
        if self._untagged is not None and not _accepts(self._untagged, token):
            self._untagged = None
        if self._tag.startswith(self._written):
            return
        if self._constrained and self._untagged is None:
            raise GrammarViolated("The beginning of the answer violates its grammar; the answer was ended.")
        self._undecided, self._chosen = False, self._untagged

    def admits(self, token: int) -> bool:
        if self._undecided or self._chosen is None:
            return super().admits(token)
        return self._chosen.admits(token)

    @property
    def narrow(self) -> bool:
        return self._constrained if self._undecided else self._chosen is not None and self._chosen.narrow


class AnyMatcher(GrammarMatcher):
    """What any of several matchers allows, each for as long as it allows what comes."""

    free = False

    def __init__(self, vocabulary: GrammarVocabulary, matchers: Sequence[GrammarMatcher]) -> None:
        self._vocabulary = vocabulary
        self._matchers = list(matchers)

    def inner(self) -> Iterable[GrammarMatcher]:
        return self._matchers

    @property
    def done(self) -> bool:
        return all(matcher.done for matcher in self._matchers)

    def mask(self) -> TokenMask | None:
        masks = [matcher.mask() for matcher in self._matchers]
        either = self._vocabulary.nothing()
        for mask in masks:
            if mask is None:
                return None
            either |= mask[: len(either)]
        return either

    def accept(self, token: int) -> None:
        self._matchers = [matcher for matcher in self._matchers if _accepts(matcher, token)]
        if not self._matchers:
            raise GrammarViolated("The answer violates every grammar it could follow, and was ended.")

    def admits(self, token: int) -> bool:
        return any(matcher.admits(token) for matcher in self._matchers)

    @property
    def narrow(self) -> bool:
        return all(matcher.narrow for matcher in self._matchers)


class AllMatcher(GrammarMatcher):
    """What all of several matchers allow. None of them ends the answer."""

    done = False

    def __init__(self, matchers: Sequence[GrammarMatcher]) -> None:
        self._matchers = matchers

    def inner(self) -> Iterable[GrammarMatcher]:
        return self._matchers

    @property
    def free(self) -> bool:
        return all(matcher.free for matcher in self._matchers)

    def mask(self) -> TokenMask | None:
        masks = [mask for matcher in self._matchers if (mask := matcher.mask()) is not None]
        size = min(map(len, masks), default=0)
        return np.bitwise_and.reduce([mask[:size] for mask in masks]) if masks else None

    def accept(self, token: int) -> None:
        for matcher in self._matchers:
            matcher.accept(token)

    def admits(self, token: int) -> bool:
        return all(matcher.admits(token) for matcher in self._matchers)

    @property
    def narrow(self) -> bool:
        return any(matcher.narrow for matcher in self._matchers)


class MatcherChain(GrammarMatcher):
    """Matchers one after another: the next begins when one is done. After the last, unless it `ends`, all is free."""

    def __init__(self, matchers: Sequence[GrammarMatcher], *, ends: bool) -> None:
        self._matchers = matchers
        self._ends = ends
        self._at = 0
        self._advance()

    def inner(self) -> Iterable[GrammarMatcher]:
        return self._matchers

    @property
    def _current(self) -> GrammarMatcher | None:
        return self._matchers[self._at] if self._at < len(self._matchers) else None

    @property
    def free(self) -> bool:
        return self._current is None or self._current.free

    @property
    def done(self) -> bool:
        return self._ends and self._at == len(self._matchers) - 1 and self._matchers[self._at].done

    def mask(self) -> TokenMask | None:
        return None if self._current is None else self._current.mask()

    def accept(self, token: int) -> None:
        if self._current is not None:
            self._current.accept(token)
            self._advance()

    def admits(self, token: int) -> bool:
        return self._current is None or self._current.admits(token)

    @property
    def narrow(self) -> bool:
        return self._current is not None and self._current.narrow

    def _advance(self) -> None:
        last = len(self._matchers) - 1 if self._ends else len(self._matchers)
        while self._at < last and self._matchers[self._at].done:
            self._at += 1


def _accepts(matcher: GrammarMatcher, token: int) -> bool:
    """Whether the matcher allows the token, which it then has accepted."""
    if not matcher.admits(token):
        return False
    matcher.accept(token)
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
    """A grammar of answers that may be calls: it writes the headers of messages itself, where the format has any."""

    grammar: CompiledGrammar

    def begin(self) -> GrammarMatcher:
        return self.grammar.begin()


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
        closing = vocabulary.encode(f"\n{thinking.close}\n\n")  # as templates write it after a thinking part
        return cls(thinking.open.encode(), thinking.close.encode(), tuple(closing))


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    vocabulary: GrammarVocabulary
    grammar: CompiledGrammar | None
    calls: CompiledGrammar | None  # what may come instead
    header: tuple[int, ...]  # of the message that the grammar is for
    tags: ThinkingTokens | None  # None: no thinking
    opened: bool
    budget: int | None

    def begin(self) -> GrammarMatcher:
        if self.tags is None:
            return self._constrained()
        thinking = self._thinking(self.tags)
        if self.opened:
            return thinking
        untagged = self._constrained() if self.grammar else None
        return OptionalTagMatcher(self.vocabulary, self.tags.open, thinking, untagged)

    def _constrained(self) -> GrammarMatcher:
        assert self.grammar is not None
        header = [ForcedTokensMatcher(self.vocabulary, self.header)] if self.header else []
        answer = MatcherChain([*header, self.grammar.begin()], ends=True)
        return AnyMatcher(self.vocabulary, [self.calls.begin(), answer]) if self.calls else answer

    def _thinking(self, tags: ThinkingTokens) -> GrammarMatcher:
        vocabulary, constrained = self.vocabulary, self.grammar is not None
        closing = tags.closing if constrained else (*tags.closing, *tags.bridge)
        thinking = ThinkingMatcher(vocabulary, tags.close, closing, self.budget, before_grammar=constrained)
        if not constrained:
            return MatcherChain([thinking], ends=False)
        if tags.bridge:
            bridge = ForcedTokensMatcher(vocabulary, tags.bridge)
            return MatcherChain([thinking, bridge, self._constrained()], ends=True)
        return MatcherChain([thinking, SpacedMatcher(vocabulary, self._constrained())], ends=True)


@dataclass(frozen=True, slots=True)
class CombinedGrammar:
    """Grammars that hold at the same time."""

    grammars: tuple[CompiledGrammar, ...]

    def begin(self) -> GrammarMatcher:
        return AllMatcher([grammar.begin() for grammar in self.grammars])


def compose_answer_grammar(
    vocabulary: GrammarVocabulary,
    grammar: CompiledGrammar | None,
    format: Format,
    start: ThinkingStart,
    *,
    calls: CompiledGrammar | None,
    budget: int | None,
    may_think: bool,
) -> CompiledGrammar | None:
    """See `Grammars.answer`."""
    if grammar is None:
        grammar, calls = calls, None
    opened = start is ThinkingStart.OPENED
    tags = ThinkingTokens.of(vocabulary, format) if opened or may_think else None
    if tags is not None:
        vocabulary.expect(tags.open, tags.close)
    if grammar is None:
        return AnswerGrammar(vocabulary, None, None, (), tags, opened, budget) if tags and budget is not None else None
    headed = format.channels is None or isinstance(grammar, CallAnswerGrammar)
    header = () if headed or format.channels is None else tuple(vocabulary.encode(format.channels.answer))
    alone = not (tags or header or calls)
    return grammar if alone else AnswerGrammar(vocabulary, grammar, calls, header, tags, opened, budget)
