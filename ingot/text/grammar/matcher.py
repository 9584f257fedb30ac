"""What the engine knows of constrained answers: which tokens may come next, and when the answer is complete.

A `CompiledGrammar` is shared and never changes; a `GrammarMatcher` is one sequence's, made by it, and belongs to the
engine thread. No mlx.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ingot.errors import BadRequest, IngotError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TokenMask: TypeAlias = "NDArray[np.uint32]"
"""One bit for each row of the model's vocabulary, 32 to a word, the lowest first. Set: the token may come next."""


class GrammarViolated(IngotError):
    """The answer left its grammar, which is a fault of ours. It must end: no free text may follow."""

    code = "guide_broken"


class GrammarTooComplex(BadRequest):
    """Following this grammar takes more work than one request may cost."""

    code = "grammar_too_complex"


class GrammarMatcher(ABC):
    """One sequence's. Tokens are accepted in order, each exactly once, also across preemption.

    `mask`, `accept` and `admits` raise GrammarTooComplex or GrammarViolated, after which the sequence must end. Looking
    ahead, for speculation, accepts tokens and rolls back: a copy would cost more the longer the answer is.
    """

    @property
    @abstractmethod
    def free(self) -> bool:
        """Whether neither the next token nor the one after it is constrained: nobody need wait to read it."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether the answer is complete: nothing can follow but a stop token, and nothing need."""

    @abstractmethod
    def mask(self) -> TokenMask | None:
        """The tokens that may come next; None where all may. The caller may read it until the next call."""

    @abstractmethod
    def accept(self, token: int) -> None:
        """The token that was sampled."""

    def admits(self, token: int) -> bool:
        """Whether the mask allows the token, where possible for less work than the whole mask takes."""
        mask = self.mask()
        return mask is None or allows_token(mask, token)

    @property
    def narrow(self) -> bool:
        """Whether only one token may be allowed next. Cheap, unlike finding out which."""
        return True

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first on, may come next in this order and leave the answer incomplete.

        Never raises: a matcher that fails does so when its mask is computed.
        """
        count = 0
        with self._restoring():
            for token in tokens:
                if not self._goes_on(token):
                    break
                count += 1
        return count

    def masks(self, tokens: Sequence[int]) -> list[TokenMask | None]:
        """The mask now and after each of these tokens, which it agreed to. They are the caller's to keep."""
        found = []
        with self._restoring():
            for token in tokens:
                found.append(_copy_mask(self.mask()))
                self.accept(token)
            found.append(_copy_mask(self.mask()))
        return found

    def forced(self, most: int) -> tuple[int, ...]:
        """The tokens, so many at most, that come next whatever is sampled, as each mask allows only one. Never
        raises."""
        found: list[int] = []
        with self._restoring():
            while len(found) < most and (token := self._only_token()) is not None and self._goes_on(token):
                found.append(token)
        return tuple(found)

    def inner(self) -> Iterable[GrammarMatcher]:
        """The matchers that this one is made of, whose state is part of its own."""
        return ()

    def snapshot(self) -> Any:
        """The state, to `rollback` to. What an attribute holds must be replaced, not changed, when it changes."""
        return dict(vars(self)), [(matcher, matcher.snapshot()) for matcher in self.inner()]

    def rollback(self, snapshot: Any) -> None:
        """Return to an earlier state, with no rollback to one still earlier in between."""
        own, inner = snapshot
        vars(self).update(own)
        for matcher, state in inner:
            matcher.rollback(state)

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        state = self.snapshot()
        try:
            yield
        finally:
            self.rollback(state)

    def _goes_on(self, token: int) -> bool:
        """Whether the token may come next and leaves more to come; it then has been accepted."""
        try:
            if not self.admits(token):
                return False
            self.accept(token)
        except IngotError:
            return False
        return not self.done

    def _only_token(self) -> int | None:
        """The one token that may come next, if there is only one."""
        try:
            mask = self.mask() if self.narrow else None
        except IngotError:
            return None
        if mask is None:
            return None
        words = mask.nonzero()[0]
        bits = int(mask[words[0]]) if len(words) == 1 else 0
        return 32 * int(words[0]) + bits.bit_length() - 1 if bits.bit_count() == 1 else None


def _copy_mask(mask: TokenMask | None) -> TokenMask | None:
    return None if mask is None else mask.copy()


def allows_token(mask: TokenMask, id: int) -> bool:
    return bool(int(mask[id >> 5]) >> (id & 31) & 1)


class CompiledGrammar(Protocol):
    """What a request's answers are constrained to. Any thread may hold it."""

    def begin(self) -> GrammarMatcher:
        """A matcher for a new sequence. Cheap: whatever takes long was done when the grammar was compiled."""
        ...
