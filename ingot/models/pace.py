"""Loading a model in pieces, so that the thread that does it can see to other models' requests in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import mlx.core as mx

PIECE: Final = 256 << 20
"""Bytes of weights that are read at a time."""


def _nothing() -> None: ...


_between: ContextVar[Callable[[], None]] = ContextVar("between", default=_nothing)


@contextmanager
def paced(between: Callable[[], None]) -> Iterator[None]:
    """What is loaded in the block calls `between` after each piece. It may raise, which ends the load."""
    token = _between.set(between)
    try:
        yield
    finally:
        _between.reset(token)


def pause() -> None:
    """A piece is done."""
    _between.get()()


def evaluate(arrays: Iterable[mx.array]) -> None:
    """Read or compute arrays that are not there yet, a piece at a time."""
    piece: list[mx.array] = []
    for array in arrays:
        piece.append(array)
        if sum(each.nbytes for each in piece) >= PIECE:
            mx.eval(piece)
            piece = []
            pause()
    mx.eval(piece)
    pause()
