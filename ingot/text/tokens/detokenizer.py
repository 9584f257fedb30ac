"""Token ids to text, one at a time, with nothing emitted that a later token would change.

Everything pushed and flushed, put together, is what decoding all the ids at once (special tokens skipped) gives.
Special tokens that are to be shown appear by their names, between the texts around them.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Protocol

from ingot.text.tokenizer.vocabulary import Vocabulary
from ingot.text.tokens.token_bytes import byte_of


class Detokenizer(Protocol):
    """One sequence's text. Belongs to one thread at a time."""

    def push(self, token: int) -> str:
        """The text that is now certain; empty while a character is incomplete."""

    def flush(self) -> str:
        """The sequence has ended: the rest, with U+FFFD for what was never completed."""


class ByteDetokenizer:
    """For vocabularies whose tokens are runs of bytes: the text is their UTF-8 reading."""

    def __init__(self, token_bytes: Callable[[int], bytes], hidden_ids: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._hidden_ids = hidden_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token in self._hidden_ids:
            return ""
        return self._utf8.decode(self._token_bytes(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class PieceDetokenizer:
    """For every other vocabulary: asks the library to decode a few tokens at a time.

    Such decoders treat a text's first token in its own way (a leading space is dropped) and a run of byte tokens as
    one. So nothing is decided inside a run of byte tokens, and once the text has begun, later tokens are decoded
    behind an anchor, a plain token whose own text is known and is taken off again.
    """

    # A Python tokenizer may leave a character open without a byte token; no character takes more tokens than this.
    _LONGEST_CHARACTER = 8

    def __init__(self, vocabulary: Vocabulary, anchor: int, shown_ids: frozenset[int] = frozenset()) -> None:
        self._vocabulary = vocabulary
        self._shown_ids = shown_ids
        self._anchor = anchor
        self._anchor_size = len(vocabulary.decode([anchor], skip_special=True))
        self._waiting: list[int] = []
        self._begun = False

    def push(self, token: int) -> str:
        piece = self._vocabulary.piece(token)
        if piece and token in self._shown_ids:
            before = self.flush()
            self._begun = True
            return before + piece
        if not piece or token in self._vocabulary.special_ids:
            return ""
        self._waiting.append(token)
        if byte_of(piece) is not None:
            return ""
        text = self._decoded()
        if text.endswith("�") and not piece.endswith("�") and len(self._waiting) < self._LONGEST_CHARACTER:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decoded()) if self._waiting else ""

    def _decoded(self) -> str:
        if not self._begun:
            return self._vocabulary.decode(self._waiting, skip_special=True)
        behind = self._vocabulary.decode([self._anchor, *self._waiting], skip_special=True)
        return behind[self._anchor_size :]

    def _emit(self, text: str) -> str:
        # Until there is text, the rule for its start has not been spent.
        self._begun = self._begun or text != ""
        if self._begun:
            self._waiting.clear()
        return text
