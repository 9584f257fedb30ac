"""What the engine knows of constrained answers: which tokens may come next, and when the answer is complete.

Plain values, no mlx. A `CompiledGrammar` is shared and never changes; a `GrammarMatcher` is one sequence's, made by it,
and belongs to the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ingot.errors import BadRequest, IngotError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TokenMask: TypeAlias = "NDArray[np.uint32]"
"""One bit for each row of the model's vocabulary, 32 to a word, the lowest first. Set: the token may come next."""


class GrammarViolated(IngotError):
    """The answer left what it was held to, which is a fault of ours. It must end: never is the rest free text."""

    code = "guide_broken"


class GrammarTooComplex(BadRequest):
    """To go on by this grammar takes more work than one request may cost."""

    code = "grammar_too_complex"


class GrammarMatcher(Protocol):
    """One sequence's. Tokens are accepted in order, each exactly once, also across preemption."""

    @property
    def free(self) -> bool:
        """Whatever the next token is, it and the one after it are not constrained: nobody need wait to read it."""
        ...

    @property
    def done(self) -> bool:
        """The answer is complete: nothing can follow but a stop token, and nothing need."""
        ...

    def mask(self) -> TokenMask | None:
        """The tokens that may come next; None where all may. Asking twice gives the same.

        Raises GrammarTooComplex or GuideBroken, after which the sequence must end. The array is the caller's to read
        until the next call, not to keep.
        """
        ...

    def accept(self, token: int) -> None:
        """The token that was drawn. Raises GrammarTooComplex or GuideBroken."""
        ...

    def admits(self, token: int) -> bool:
        """Whether the mask allows the token, for less work than the whole mask takes. Raises as `mask` does."""
        ...

    @property
    def narrow(self) -> bool:
        """Whether there may be but one token that can come next. Cheap, where it takes work to say which."""
        ...

    def agreed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first on, may come next in this order and leave the answer incomplete: a
        guide is never done by a token that others are to follow.

        Leaves the guide as it was. Never raises: a guide that fails says so when it is asked for a mask.
        """
        ...

    def masks(self, tokens: Sequence[int]) -> list[TokenMask | None]:
        """What `mask` says now, and would say after each of these tokens, which it agreed to: one mask more than there
        are tokens. They are the caller's to keep. Leaves the guide as it was, and raises as `mask` does.
        """
        ...

    def forced(self, most: int) -> tuple[int, ...]:
        """Tokens, so many at most, that come next whatever is drawn, as each mask allows but one, and that it would
        agree to. Leaves the guide as it was, and never raises."""
        ...

    def standing(self) -> Any:
        """Where the guide is, to `rollback` to."""
        ...

    def rollback(self, standing: Any) -> None:
        """Be as it was there: earlier on its way here, with nothing gone back to in between that was earlier still."""
        ...


class CompiledGrammar(Protocol):
    """What a request's answers are held to. Any thread may hold it."""

    def begin(self) -> GrammarMatcher:
        """A guide for a new sequence. Cheap: whatever takes long was done when the plan was made."""
        ...
