"""What the engine knows of constrained answers: which tokens may come next, and when the answer is complete.

Plain values, no mlx. A plan is shared and never changes; a guide is one sequence's, made by it, and belongs to the
engine thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from ingot.errors import BadRequest, IngotError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Mask: TypeAlias = "NDArray[np.uint32]"
"""One bit for each row of the model's vocabulary, 32 to a word, the lowest first. Set: the token may come next."""


class GuideBroken(IngotError):
    """The answer left what it was held to, which is a fault of ours. It must end: never is the rest free text."""

    code = "guide_broken"


class GrammarTooComplex(BadRequest):
    """To go on by this grammar takes more work than one request may cost."""

    code = "grammar_too_complex"


class Guide(Protocol):
    """One sequence's. Tokens are accepted in order, each exactly once, also across preemption."""

    @property
    def free(self) -> bool:
        """Whatever the next token is, it and the one after it are not constrained: nobody need wait to read it."""
        ...

    @property
    def done(self) -> bool:
        """The answer is complete: nothing can follow but a stop token, and nothing need."""
        ...

    def mask(self) -> Mask | None:
        """The tokens that may come next; None where all may. Asking twice gives the same.

        Raises GrammarTooComplex or GuideBroken, after which the sequence must end. The array is the caller's to read
        until the next call, not to keep.
        """
        ...

    def accept(self, token: int) -> None:
        """The token that was drawn. Raises GrammarTooComplex or GuideBroken."""
        ...


class GuidePlan(Protocol):
    """What a request's answers are held to. Any thread may hold it."""

    def begin(self) -> Guide:
        """A guide for a new sequence. Cheap: whatever takes long was done when the plan was made."""
        ...
