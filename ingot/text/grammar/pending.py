"""Grammars that are still to be compiled for a request. Whoever reads bodies does not wait for it: it takes long.

Light: a server without a model imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingot.text.grammar.compiled import LlguidanceGrammar

prepared_grammars: ContextVar[dict[bytes, LlguidanceGrammar | str] | None] = ContextVar("prepared", default=None)
"""Where it is set, nothing is compiled in place: what is neither cached nor found here raises GrammarPending."""


class GrammarPending(Exception):
    """A grammar has to be compiled first: `compile` it where that may take a while, put the result under `key` into
    what is prepared, and ask again."""

    def __init__(self, key: bytes, compile: Callable[[], LlguidanceGrammar | str], *, optional: bool = False) -> None:
        """`optional`: the request can go on without it, for which the result is why it does."""
        super().__init__("A grammar is not compiled yet.")
        self.key, self.compile, self.optional = key, compile, optional
