"""The bytes that a token stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ingot.text.tokens.byte_alphabet import ALPHABET

if TYPE_CHECKING:
    from ingot.text.tokenizer.vocabulary import Vocabulary


def spelled(vocabulary: Vocabulary, token: int) -> bytes:
    """The token's own bytes, which may be part of a character. A special token's are its name's."""
    piece = vocabulary.piece(token)
    if piece is None:
        return b""
    if token in vocabulary.special_ids or vocabulary.spelling == "plain":
        return piece.encode()
    if vocabulary.spelling == "bytes":
        return _from_byte_alphabet(piece)
    byte = byte_of(piece)
    return piece.replace("▁", " ").encode() if byte is None else bytes([byte])


def _from_byte_alphabet(piece: str) -> bytes:
    try:
        return bytes(map(ALPHABET.__getitem__, piece))
    except KeyError:  # an added token, written as plain text
        return piece.encode()


def byte_of(piece: str) -> int | None:
    """The byte that a fallback piece such as `<0x0A>` stands for."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None
