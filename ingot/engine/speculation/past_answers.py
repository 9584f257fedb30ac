"""What was answered before, for whom: answers resemble each other. Owners share nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ingot.cache.tree import Owner
from ingot.engine.speculation.suffixes import Match, Suffixes

MOST_TOKENS = 1 << 18
"""Of all answers that are remembered. Owners have an equal share of them each,"""
MOST_OWNERS = 64
"""of so many owners, those that came last."""
END = -1
"""Behind each answer: no token, so that none seems to go on with the next."""


class _Answers:
    """Of one owner, one behind another."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.index = Suffixes(self.tokens)


class PastAnswers:
    def __init__(self, most: int = MOST_TOKENS) -> None:
        self._most = most
        self._owners: OrderedDict[Owner, _Answers] = OrderedDict()

    def add(self, owner: Owner, answer: Iterable[int]) -> None:
        held = self._owners.setdefault(owner, _Answers())
        self._owners.move_to_end(owner)
        held.tokens.extend(answer)
        held.tokens.append(END)
        while len(self._owners) > MOST_OWNERS:
            self._owners.popitem(last=False)
        for each in self._owners.values():
            each.index.drop(max(0, len(each.tokens) - self._most // len(self._owners)))

    def learn(self, owner: Owner, most: int) -> int:
        """Index so many more of an owner's tokens; returns how many that were."""
        held = self._owners.get(owner)
        return 0 if held is None else held.index.learn(most)

    def find(self, owner: Owner, newest: list[int]) -> Match | None:
        held = self._owners.get(owner)
        return None if held is None else held.index.find(newest)

    def following(self, owner: Owner, at: int, most: int) -> list[int]:
        """What followed at a place that was just found."""
        found = self._owners[owner].index.following(at, most)
        return found[: found.index(END)] if END in found else found

    @property
    def count(self) -> int:
        """Tokens that are remembered."""
        return sum(len(each.tokens) for each in self._owners.values())
