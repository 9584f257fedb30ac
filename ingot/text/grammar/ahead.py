"""Looking ahead: what a guide would say after tokens that have not been drawn yet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ingot.errors import IngotError
from ingot.text.grammar.matcher import Mask
from ingot.text.grammar.vocabulary import allows


class LookingAhead(ABC):
    """A guide that can go back: it looks ahead by going there."""

    @property
    @abstractmethod
    def done(self) -> bool: ...

    @abstractmethod
    def mask(self) -> Mask | None: ...

    @abstractmethod
    def accept(self, token: int) -> None: ...

    @abstractmethod
    def standing(self) -> Any: ...

    @abstractmethod
    def go_back(self, standing: Any) -> None: ...

    def admits(self, token: int) -> bool:
        mask = self.mask()
        return mask is None or allows(mask, token)

    @property
    def narrow(self) -> bool:
        return True

    def agreed(self, tokens: Sequence[int]) -> int:
        count = 0
        with self._returning():
            for token in tokens:
                if not self._goes_on(token):
                    break
                count += 1
        return count

    def masks(self, tokens: Sequence[int]) -> list[Mask | None]:
        found = []
        with self._returning():
            for token in tokens:
                found.append(_kept(self.mask()))
                self.accept(token)
            found.append(_kept(self.mask()))
        return found

    def forced(self, most: int) -> tuple[int, ...]:
        found: list[int] = []
        with self._returning():
            while len(found) < most and (token := self._only()) is not None and self._goes_on(token):
                found.append(token)
        return tuple(found)

    @contextmanager
    def _returning(self) -> Iterator[None]:
        standing = self.standing()
        try:
            yield
        finally:
            self.go_back(standing)

    def _goes_on(self, token: int) -> bool:
        """Whether the token may come next and leaves more to come; it then has been accepted."""
        try:
            if not self.admits(token):
                return False
            self.accept(token)
        except IngotError:
            return False
        return not self.done

    def _only(self) -> int | None:
        """The one token that may come next, if there is but one."""
        try:
            mask = self.mask() if self.narrow else None
        except IngotError:
            return None
        return None if mask is None else _single(mask)


def _kept(mask: Mask | None) -> Mask | None:
    return None if mask is None else mask.copy()


def _single(mask: Mask) -> int | None:
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    bits = int(mask[words[0]])
    return 32 * int(words[0]) + bits.bit_length() - 1 if bits.bit_count() == 1 else None
