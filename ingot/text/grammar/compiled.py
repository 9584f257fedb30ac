"""Matchers that can go back, and the one that follows a grammar compiled by llguidance.

What a matcher would say after tokens that have not been sampled yet, for speculation, is found by going there and back:
the library takes tokens back for what they cost, where a copy would cost more the longer the answer is.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ingot.errors import IngotError
from ingot.text.grammar import limits
from ingot.text.grammar.matcher import GrammarTooComplex, GrammarViolated, TokenMask
from ingot.text.grammar.vocabulary import allows_token

if TYPE_CHECKING:
    from llguidance import LLMatcher


class RollbackMatcher(ABC):
    """A guide that can go back: it looks ahead by going there."""

    @property
    @abstractmethod
    def done(self) -> bool: ...

    @abstractmethod
    def mask(self) -> TokenMask | None: ...

    @abstractmethod
    def accept(self, token: int) -> None: ...

    @abstractmethod
    def standing(self) -> Any: ...

    @abstractmethod
    def rollback(self, standing: Any) -> None: ...

    def admits(self, token: int) -> bool:
        mask = self.mask()
        return mask is None or allows_token(mask, token)

    @property
    def narrow(self) -> bool:
        return True

    def agreed(self, tokens: Sequence[int]) -> int:
        count = 0
        with self._returning():
            for token in tokens:
                if not self._goes_on(token):
                    break
                count += 1
        return count

    def masks(self, tokens: Sequence[int]) -> list[TokenMask | None]:
        found = []
        with self._returning():
            for token in tokens:
                found.append(_copy_mask(self.mask()))
                self.accept(token)
            found.append(_copy_mask(self.mask()))
        return found

    def forced(self, most: int) -> tuple[int, ...]:
        found: list[int] = []
        with self._returning():
            while len(found) < most and (token := self._only()) is not None and self._goes_on(token):
                found.append(token)
        return tuple(found)

    @contextmanager
    def _returning(self) -> Iterator[None]:
        standing = self.standing()
        try:
            yield
        finally:
            self.rollback(standing)

    def _goes_on(self, token: int) -> bool:
        """Whether the token may come next and leaves more to come; it then has been accepted."""
        try:
            if not self.admits(token):
                return False
            self.accept(token)
        except IngotError:
            return False
        return not self.done

    def _only(self) -> int | None:
        """The one token that may come next, if there is but one."""
        try:
            mask = self.mask() if self.narrow else None
        except IngotError:
            return None
        return None if mask is None else _single_token(mask)


def _copy_mask(mask: TokenMask | None) -> TokenMask | None:
    return None if mask is None else mask.copy()


def _single_token(mask: TokenMask) -> int | None:
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    bits = int(mask[words[0]])
    return 32 * int(words[0]) + bits.bit_length() - 1 if bits.bit_count() == 1 else None


log = logging.getLogger("ingot.grammar")

TOO_COMPLEX = "The grammar is too complex: to follow it takes more work than an answer may cost."

_LIMIT_WORDS = ("max is", "too many", "too complex", "too long", "limit", "fuel")


class LlguidanceGrammar:
    """A plan: its matcher stands at the beginning and is only ever copied.

    What it costs to follow is counted over all its answers. A grammar that is slow at too many tokens, or runs into the
    library's limits, is given up for good, so that it does not hold up everyone else's nor keep its memory.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher: LLMatcher | None = matcher
        self._slow = self._steps = 0
        self.unheld: tuple[str, ...] = ()  # tools whose schemas it does not hold to

    @property
    def given_up(self) -> bool:
        return self._matcher is None

    def begin(self) -> LlguidanceMatcher:
        if self._matcher is None:
            raise GrammarTooComplex(TOO_COMPLEX)
        return LlguidanceMatcher(self._matcher.deep_copy(), self)

    def took(self, seconds: float) -> None:
        """One token's work is done. Called by the engine thread alone."""
        self._slow += seconds > limits.SLOW_MASK_S
        self._steps += 1
        if self._slow > limits.SLOW_MASKS + self._steps // limits.SLOW_SHARE:
            raise self.failed("it takes too long for each token")

    def failed(self, message: str) -> GrammarTooComplex | GrammarViolated:
        """What an answer that cannot go on ends with. The limits are the grammar's fault, all else is ours."""
        log.warning("an answer could not be held to its grammar: %s", message.partition("<")[0].strip())
        if not any(sign in message for sign in _LIMIT_WORDS):
            return GrammarViolated("The answer could not be held to its grammar, and was given up.")
        self._matcher = None
        return GrammarTooComplex(TOO_COMPLEX)


class LlguidanceMatcher(RollbackMatcher):
    """Never free: what may come next follows from each token."""

    free = False

    def __init__(self, matcher: LLMatcher, grammar: LlguidanceGrammar) -> None:
        self._matcher = matcher
        self._grammar = grammar
        self._mask: TokenMask | None = None
        self._accepted = 0

    @property
    def done(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self) -> TokenMask:
        if self._mask is None:
            began = time.thread_time()
            packed = self._matcher.compute_bitmask()
            self._check()
            self._mask = np.frombuffer(packed, dtype=np.uint32)
            self._grammar.took(time.thread_time() - began)
        return self._mask

    def accept(self, token: int) -> None:
        self._mask = None
        self._accepted += 1
        self._matcher.consume_token(token)
        self._check()

    def admits(self, token: int) -> bool:
        if self._mask is not None:
            return allows_token(self._mask, token)
        # Of several ways to write what must come, the library's masks allow the tokenizer's own alone.
        forced = self._matcher.compute_ff_tokens()
        admitted = token == forced[0] if forced else self._matcher.validate_tokens([token]) == 1
        self._check()
        return admitted

    def follow(self, tokens: Sequence[int]) -> bool:
        """Accept tokens that were drawn without a mask, if they may come next in this order."""
        self._mask = None
        self._accepted += len(tokens)
        return self._matcher.try_consume_tokens(list(tokens)) == len(tokens)

    def could_follow(self, tokens: Sequence[int]) -> bool:
        return self._matcher.validate_tokens(list(tokens)) == len(tokens)

    @property
    def narrow(self) -> bool:
        return bool(self._matcher.compute_ff_bytes())

    def standing(self) -> tuple[int, TokenMask | None]:
        return self._accepted, self._mask

    def rollback(self, standing: tuple[int, TokenMask | None]) -> None:
        # A copy to look ahead with would cost more the longer the answer is. What fails in looking ahead stays failed.
        accepted, self._mask = standing
        self._matcher.rollback(self._accepted - accepted)
        self._accepted = accepted

    def _check(self) -> None:
        if self._matcher.is_error():
            raise self._grammar.failed(self._matcher.get_error())
