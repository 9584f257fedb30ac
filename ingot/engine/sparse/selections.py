"""What was left of prompts, for who asks for one again and for who goes on from there: a next turn keeps what the one
before kept, and finds the states of that."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from ingot.engine.specprefill.selection import Numbers, Places

REMEMBERED = 64
"""Prompts."""


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """Of a prompt, by its `keys` in the prefix index, so much was `kept` by the `terms` that a request asked by."""

    terms: Hashable
    keys: Numbers
    kept: Places

    @property
    def length(self) -> int:
        return self.keys.size

    def begins(self, terms: Hashable, keys: Numbers) -> bool:
        return self.terms == terms and self.length <= keys.size and bool((self.keys == keys[: self.length]).all())


class Selections:
    def __init__(self) -> None:
        self._held: list[Selection] = []  # the one that was used last is the last

    def remember(self, terms: Hashable, keys: Many[int], kept: Places) -> None:
        self._use(Selection(terms, np.asarray(keys, np.int64), kept))

    def longest(self, terms: Hashable, keys: Many[int]) -> Selection | None:
        """That of the longest prompt that one of these keys begins with, which may be all of it."""
        told = np.asarray(keys, np.int64)
        begun = [each for each in self._held if each.begins(terms, told)]
        found = max(begun, key=lambda each: each.length, default=None)
        if found is not None:
            self._use(found)
        return found

    def _use(self, selection: Selection) -> None:
        others = [each for each in self._held if each is not selection]
        self._held = [*others, selection][-REMEMBERED:]
