"""The answers that were generated, as the tokens they were generated in.

A client sends an answer back as text. Encoded again, that text need not give the tokens that were computed, and often
enough it is not even whole: the thinking is missing, and the calls have been written anew. So each answer is kept
under the conversation that it ends, and put into the next turn's prompt as it was.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

MOST_TOKENS: Final = 4_000_000
MOST_VARIANTS: Final = 4
_OVERHEAD: Final = 64  # what an answer costs besides its tokens, in tokens


@dataclass(frozen=True, slots=True)
class RememberedAnswer:
    """`opening` is the text that stood between the last message and the answer; `tokens` leave out the one that
    ended it, since the template writes one of its own. `reasoning` has no white space: some protocols cut it into
    blocks, which clients join as they like. `missing` is what an answer that was cut short lacks."""

    opening: str
    tokens: array[int]
    reasoning: str = ""
    missing: str = ""

    @property
    def cost(self) -> int:
        return len(self.tokens) + len(self.opening) + len(self.reasoning) // 4 + _OVERHEAD


class Journal(Protocol):
    """Where answers outlast the server."""

    def read(self) -> Iterable[tuple[bytes, RememberedAnswer]]:
        """Those of before, oldest first."""
        ...

    def add(self, thread: bytes, answer: RememberedAnswer) -> None:
        """Never waits."""
        ...


class RememberedAnswers:
    """Bounded; those that were not asked for longest go first. Any thread may ask."""

    def __init__(self, most_tokens: int = MOST_TOKENS, journal: Journal | None = None) -> None:
        self._most, self._journal = most_tokens, journal
        self._kept: OrderedDict[bytes, tuple[RememberedAnswer, ...]] = OrderedDict()
        self._cost = 0
        self._lock = threading.Lock()
        for thread, answer in journal.read() if journal is not None else ():
            self._remember(thread, answer)

    def keep(self, thread: bytes, opening: str, tokens: Sequence[int], reasoning: str = "", missing: str = "") -> None:
        """Remember the answer after which a conversation is named `thread`."""
        answer = RememberedAnswer(opening, array("I", tokens), _squeezed(reasoning), missing)
        self._remember(thread, answer)
        if self._journal is not None:
            self._journal.add(thread, answer)

    def _remember(self, thread: bytes, answer: RememberedAnswer) -> None:
        with self._lock:
            others = [each for each in self._kept.pop(thread, ()) if self._forget(each) and each != answer]
            self._put(thread, (answer, *others[: MOST_VARIANTS - 1]))

    def recall(self, thread: bytes, reasoning: str | None = None) -> RememberedAnswer | None:
        """The newest answer that ends this conversation; one with this reasoning, where the client tells of it."""
        with self._lock:
            found = self._kept.get(thread)
            if found is None:
                return None
            self._kept.move_to_end(thread)
            told = None if reasoning is None else _squeezed(reasoning)
            return next((each for each in found if told in (None, each.reasoning)), None)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._cost = 0

    def __len__(self) -> int:
        return len(self._kept)

    def _put(self, thread: bytes, answers: tuple[RememberedAnswer, ...]) -> None:
        self._kept[thread] = answers
        self._cost += sum(each.cost for each in answers)
        while self._cost > self._most and self._kept:
            _, oldest = self._kept.popitem(last=False)
            self._cost -= sum(each.cost for each in oldest)

    def _forget(self, answer: RememberedAnswer) -> bool:
        self._cost -= answer.cost
        return True


def _squeezed(text: str) -> str:
    return "".join(text.split())
