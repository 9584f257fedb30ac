"""A compiled grammar, and an answer that follows it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ingot.text.grammar import limits
from ingot.text.grammar.ahead import LookingAhead
from ingot.text.grammar.matcher import GrammarTooComplex, GuideBroken, Mask
from ingot.text.grammar.vocabulary import allows

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger("ingot.grammar")

TOO_COMPLEX = "The grammar is too complex: to follow it takes more work than an answer may cost."

_LIMITS = ("max is", "too many", "too complex", "too long", "limit", "fuel")


class CompiledGrammar:
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

    def begin(self) -> GrammarGuide:
        if self._matcher is None:
            raise GrammarTooComplex(TOO_COMPLEX)
        return GrammarGuide(self._matcher.deep_copy(), self)

    def took(self, seconds: float) -> None:
        """One token's work is done. Called by the engine thread alone."""
        self._slow += seconds > limits.SLOW_MASK_S
        self._steps += 1
        if self._slow > limits.SLOW_MASKS + self._steps // limits.SLOW_SHARE:
            raise self.failed("it takes too long for each token")

    def failed(self, message: str) -> GrammarTooComplex | GuideBroken:
        """What an answer that cannot go on ends with. The limits are the grammar's fault, all else is ours."""
        log.warning("an answer could not be held to its grammar: %s", message.partition("<")[0].strip())
        if not any(sign in message for sign in _LIMITS):
            return GuideBroken("The answer could not be held to its grammar, and was given up.")
        self._matcher = None
        return GrammarTooComplex(TOO_COMPLEX)


class GrammarGuide(LookingAhead):
    """Never free: what may come next follows from each token."""

    free = False

    def __init__(self, matcher: LLMatcher, grammar: CompiledGrammar) -> None:
        self._matcher = matcher
        self._grammar = grammar
        self._mask: Mask | None = None
        self._accepted = 0

    @property
    def done(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self) -> Mask:
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
            return allows(self._mask, token)
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

    def standing(self) -> tuple[int, Mask | None]:
        return self._accepted, self._mask

    def go_back(self, standing: tuple[int, Mask | None]) -> None:
        # A copy to look ahead with would cost more the longer the answer is. What fails in looking ahead stays failed.
        accepted, self._mask = standing
        self._matcher.rollback(self._accepted - accepted)
        self._accepted = accepted

    def _check(self) -> None:
        if self._matcher.is_error():
            raise self._grammar.failed(self._matcher.get_error())
