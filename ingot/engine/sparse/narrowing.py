"""A draft that reads a long prompt does not see all of it from each token: then reading on costs no more and more."""

from __future__ import annotations

from ingot.cache.attention_state import AppendState
from ingot.cache.batch_state import Rows
from ingot.cache.forward_batch import Row
from ingot.cache.page_choice import PageChoice


class Narrowing:
    """While it is open, passes over one row, and nothing else, see what is chosen in each layer that keeps all tokens.
    What the last tokens of a prompt ask of all others is not computed in such a pass. As long as there is nothing to
    choose from, layers are left alone."""

    def __init__(self, rows: Rows, row: Row) -> None:
        self._row = row
        self._choices = {state: PageChoice(state, row) for state in rows.states if type(state) is AppendState}

    def __enter__(self) -> None:
        for state, choice in self._choices.items():
            state.choice = choice if choice.narrows(self._row.length) else None

    def __exit__(self, *_: object) -> None:
        for state in self._choices:
            state.choice = None
