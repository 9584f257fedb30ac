"""Sequences that are held to something: what their guides allow, and what becomes of those whose guide fails.

A guide's failure is its own sequence's alone: it is noted on the sequence, whose request then ends with it.
"""

from __future__ import annotations

from ingot.engine.sequence import Sequence
from ingot.errors import IngotError
from ingot.text.grammar.matcher import Mask


def begin(sequence: Sequence) -> None:
    if sequence.request.guide is None:
        return
    try:
        sequence.guide = sequence.request.guide.begin()
    except IngotError as error:
        sequence.failure = error


def masks(sequence: Sequence, guess: tuple[int, ...] = ()) -> list[Mask | None]:
    """What its guide allows next, and behind each token of a guess that the guide agreed to. A guide that has come to
    its end allows anything: the draw will not count."""
    guide = sequence.guide
    if guide is None or sequence.unmasked is not None or guide.done:
        return [None] * (len(guess) + 1)
    try:
        return guide.masks(guess) if guess else [guide.mask()]
    except IngotError as error:
        sequence.unmasked = error
        return [None] * (len(guess) + 1)


def agreed(sequence: Sequence, guess: tuple[int, ...]) -> tuple[int, ...]:
    """As much of a guess as its guide could accept, without coming to its end."""
    if sequence.guide is None or not guess:
        return guess
    if sequence.unmasked is not None or sequence.guide.done:
        return ()
    try:
        return guess[: sequence.guide.agreed(guess)]
    except IngotError as error:
        sequence.unmasked = error
        return ()


def accept(sequence: Sequence, token: int) -> None:
    if sequence.guide is None or sequence.failure is not None:
        return
    try:
        if sequence.unmasked is not None:
            raise sequence.unmasked
        sequence.guide.accept(token)
    except IngotError as error:
        sequence.failure = error


def needs_tokens(sequence: Sequence) -> bool:
    """Whether its next draw depends on tokens that were drawn and not yet read."""
    return sequence.guide is not None and not sequence.known and not sequence.guide.free


def is_done(sequence: Sequence) -> bool:
    return sequence.guide is not None and sequence.guide.done
