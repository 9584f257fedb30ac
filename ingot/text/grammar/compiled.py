"""Grammars compiled by llguidance, and the matcher that follows one."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ingot.text.grammar import limits
from ingot.text.grammar.matcher import GrammarMatcher, GrammarTooComplex, GrammarViolated, TokenMask, allows_token

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger("ingot.grammar")

TOO_COMPLEX = "The grammar is too complex: to follow it takes more work than an answer may cost."

_LIMIT_WORDS = ("max is", "too many", "too complex", "too long", "limit", "fuel")


class LlguidanceGrammar:
    """Its matcher stays at the beginning and is only ever copied.

    The cost of following it is counted over all its answers. A grammar that is slow at too many tokens, or runs into
    the library's limits, is abandoned for good, so that it neither delays everyone else nor keeps its memory.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher: LLMatcher | None = matcher
        self._slow = self._steps = 0
        self.unenforced: tuple[str, ...] = ()  # tools whose schemas it does not enforce

    @property
    def abandoned(self) -> bool:
        return self._matcher is None

    def begin(self) -> LlguidanceMatcher:
        if self._matcher is None:
            raise GrammarTooComplex(TOO_COMPLEX)
        return LlguidanceMatcher(self._matcher.deep_copy(), self)

    def took(self, seconds: float) -> None:
        """Count the time of one token's mask. Called by the engine thread alone."""
        self._slow += seconds > limits.SLOW_MASK_S
        self._steps += 1
        if self._slow > limits.SLOW_MASKS + self._steps // limits.SLOW_SHARE:
            raise self.failed("it takes too long for each token")

    def failed(self, message: str) -> GrammarTooComplex | GrammarViolated:
        """The error that ends an answer. Exceeded limits are the grammar's fault, all else is ours."""
        log.warning("an answer could not follow its grammar: %s", message.partition("<")[0].strip())
        if not any(sign in message for sign in _LIMIT_WORDS):
            return GrammarViolated("The answer could not follow its grammar and was ended.")
        self._matcher = None
        return GrammarTooComplex(TOO_COMPLEX)


class LlguidanceMatcher(GrammarMatcher):
    """Never free: what may come next depends on each token."""

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
        # The library's masks allow forced text only in the tokenizer's own tokens.
        forced = self._matcher.compute_ff_tokens()
        admitted = token == forced[0] if forced else self._matcher.validate_tokens([token]) == 1
        self._check()
        return admitted

    def follow(self, tokens: Sequence[int]) -> bool:
        """Accept tokens that were sampled without a mask, if they may come next in this order."""
        self._mask = None
        self._accepted += len(tokens)
        return self._matcher.try_consume_tokens(list(tokens)) == len(tokens)

    def could_follow(self, tokens: Sequence[int]) -> bool:
        return self._matcher.validate_tokens(list(tokens)) == len(tokens)

    @property
    def narrow(self) -> bool:
        return bool(self._matcher.compute_ff_bytes())

    def snapshot(self) -> tuple[int, TokenMask | None]:
        return self._accepted, self._mask

    def rollback(self, snapshot: tuple[int, TokenMask | None]) -> None:
        # A matcher that failed while looking ahead stays failed.
        accepted, self._mask = snapshot
        self._matcher.rollback(self._accepted - accepted)
        self._accepted = accepted

    def _check(self) -> None:
        if self._matcher.is_error():
            raise self._grammar.failed(self._matcher.get_error())
