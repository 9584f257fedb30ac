"""The least number of tokens that a text can have, known without encoding it.

A token covers no more letters, digits, spaces and so on than the one with the most of them in the whole vocabulary. So
a text with a million letters has at least a million divided by that many tokens. Where the encoder may leave out or
shorten what it reads (a normalizer that strips accents, words it does not know), nothing can be said.
"""

from __future__ import annotations

import json
import string
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE

from ingot.text.tokens.byte_alphabet import ALPHABET

_CLASSES: Final = tuple(
    chars.encode() for chars in (string.ascii_letters, string.digits, string.whitespace, string.punctuation)
)
_PIECE: Final = 1 << 18
_ASCII: Final = bytes(range(128))
_BEYOND: Final = bytes(range(128, 256))
_NEVER: Final = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})  # bytes that no text has
_COMPOSED: Final = 3  # bytes that composing characters makes into one: three letters of Hangul, a syllable
_KEEPING: Final = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")


class Gauge:
    """The floor of one vocabulary, found out when it is first asked for. For any thread."""

    def __init__(self, find: Callable[[], Floor | None]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._floor: Floor | None = None
        self._known = False

    def least(self, text: str) -> int:
        """No encoding of `text` has fewer tokens than this; 0 where nothing is known."""
        with self._lock:
            if not self._known:
                self._floor, self._known = self._find(), True
        return 0 if self._floor is None else self._floor.least(text)


@dataclass(frozen=True, slots=True)
class Floor:
    """`most`: of letters, digits, white space, punctuation, bytes beyond ASCII and bytes at all, the most in any one
    token; 0 where that is unlimited. `composes`: characters may be composed before they are encoded."""

    most: tuple[int, ...]
    composes: bool = False

    @classmethod
    def of(cls, library: Library, spelled: Iterable[bytes]) -> Floor | None:
        """That of a library whose tokens stand for these bytes. None where there is none."""
        composes, lost = _normalizing(library.normalizer), _lost(library)
        if composes is None or lost is None or not _keeps_all(library.pre_tokenizer):
            return None
        counts = _most_counted(spelled)
        # Some tokens take the white space around them along, however much there is.
        added = library.get_added_tokens_decoder().values()
        if any(token.lstrip or token.rstrip for token in added):
            counts[2] = 0
        # What has no token is left out, however much of it there is.
        missing = [any(byte in lost for byte in chars) for chars in (*_CLASSES, _BEYOND, bytes(range(256)))]
        return cls(tuple(0 if some else count for count, some in zip(counts, missing, strict=True)), composes)

    def least(self, text: str) -> int:
        """No encoding of `text` has fewer tokens than this."""
        counts = _counted(text.encode("utf-8", "replace"))
        if self.composes and not text.isascii():
            # An ASCII character can be composed only with one beyond ASCII.
            *ascii, other, all_bytes = counts
            beyond = len(text) - sum(ascii)
            counts = [*(max(0, count - beyond) for count in ascii), other // _COMPOSED, all_bytes // _COMPOSED]
        return max(-(-count // most) if most else 0 for count, most in zip(counts, self.most, strict=True))


def _counted(data: bytes) -> list[int]:
    """How many bytes of each class there are. Piece by piece, as nothing else runs while one is counted."""
    pieces = [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)]
    counts = [sum(len(piece) - len(piece.translate(None, chars)) for piece in pieces) for chars in _CLASSES]
    return [*counts, sum(len(piece.translate(None, _ASCII)) for piece in pieces), len(data)]


def _most_counted(tokens: Iterable[bytes]) -> list[int]:
    """The most of each class in any one of them, of which there may be hundreds of thousands."""
    held = [token for token in tokens if token]
    data = np.frombuffer(b"".join(held), np.uint8)
    begins = np.cumsum([0, *map(len, held)])[:-1]
    most = []
    for chars in (*_CLASSES, _BEYOND, _ASCII + _BEYOND):
        counted = np.zeros(256, np.int32)
        counted[list(chars)] = 1
        most.append(int(np.add.reduceat(counted[data], begins).max()) if held else 0)
    return most


def _normalizing(normalizer: Any) -> bool | None:
    """Whether characters are composed; None where a normalizer may leave out or shorten more than that."""
    found = [_normalizes(step) for step in _steps(normalizer, "normalizers")]
    return None if None in found else any(found)


def _normalizes(step: Mapping[str, Any]) -> bool | None:
    match step:
        case {"type": "NFC"}:
            return True
        case {"type": "Prepend"}:
            return False
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            # Of one white space another is made, which tokens spell as white space.
            return False if (pattern, content) == (" ", "▁") else None
    return None


def _keeps_all(pre_tokenizer: Any) -> bool:
    for step in _steps(pre_tokenizer, "pretokenizers"):
        kept = step["type"] in ("ByteLevel", "Metaspace", "Digits")
        if not kept and not (step["type"] == "Split" and step["behavior"] in _KEEPING):
            return False
    return True


def _lost(library: Library) -> frozenset[int] | None:
    """Bytes that have no token. None where more than single bytes may be unknown."""
    model = library.model
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if not model.byte_fallback and "ByteLevel" not in _kinds(library.pre_tokenizer, "pretokenizers"):
        return None
    names = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    if not model.byte_fallback:
        names = {byte: char for char, byte in ALPHABET.items()}
    lost = frozenset(byte for byte, name in names.items() if library.token_to_id(name) is None) - _NEVER
    return None if lost and model.unk_token is not None else lost


def _kinds(component: Any, within: str) -> list[str]:
    return [step["type"] for step in _steps(component, within)]


def _steps(component: Any, within: str) -> list[dict[str, Any]]:
    """What a component does, one after another."""
    state: dict[str, Any] = {"type": "Sequence", within: []}
    if component is not None:
        state = json.loads(component.__getstate__())
    if state["type"] != "Sequence":
        return [state]
    return [inner for step in state[within] for inner in ([step] if step["type"] != "Sequence" else step[within])]
