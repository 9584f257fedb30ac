"""Texts that were encoded before: in the next turn of a conversation, only what is new has to be encoded.

A prompt is cut where a piece of it begins with a token that the encoder sets apart whatever stands before it, so that
its parts, encoded alone, give the tokens of the whole.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ingot.text.tokenizer.tokenizer import Tokenizer

MOST_BYTES: Final = 32 << 20
_OVERHEAD: Final = 200

EncodedText = tuple[Sequence[int], Sequence[int]]
_Key = tuple[str, str, tuple[int, ...], tuple[int, ...] | None]


class EncodedTexts:
    """Of one tokenizer. Bounded; what was not asked for longest goes first. Any thread may ask."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._kept: OrderedDict[_Key, tuple[array[int], tuple[int, ...]]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def encode(
        self,
        tokenizer: Tokenizer,
        text: str,
        places: Sequence[int],
        *,
        salt: str,
        quoted: tuple[int, ...] | None = None,
    ) -> EncodedText:
        """The ids of a text, and how many of them end at or before each place in it; `quoted` as for a tokenizer.

        Texts of different salts do not help each other: how long it takes must not tell what others have sent.
        """
        key = (salt, text, tuple(places), quoted)
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
        ids, ends = self._encoded(tokenizer, text, places, quoted)
        made = (array("I", ids), tuple(ends))
        with self._lock:
            self._keep(key, made)
        return made

    def _encoded(
        self, tokenizer: Tokenizer, text: str, places: Sequence[int], quoted: tuple[int, ...] | None
    ) -> EncodedText:
        if list(places) == [len(text)]:  # nothing within it is asked for, which takes less time
            ids = tokenizer.encode(text, add_special=False, quoted=quoted)
            return ids, [len(ids)]
        return tokenizer.encode_with_places(text, places, add_special=False, quoted=quoted)

    def _keep(self, key: _Key, made: tuple[array[int], tuple[int, ...]]) -> None:
        if key in self._kept:
            return
        self._kept[key] = made
        self._bytes += _cost(key, made)
        while self._bytes > self._most:
            self._bytes -= _cost(*self._kept.popitem(last=False))


def _cost(key: _Key, made: tuple[array[int], tuple[int, ...]]) -> int:
    # A character takes one to four bytes.
    return 2 * len(key[1]) + len(made[0]) * made[0].itemsize + _OVERHEAD
