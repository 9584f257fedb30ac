"""Bounds without encoding: the least tokens that a text can have, and how much a tokenizer lengthens it.

A token covers no more letters, digits, spaces and so on than the one with the most of them in the whole vocabulary. So
a text with a million letters has at least a million divided by that many tokens, and a prompt that is too long is
refused before it is encoded. Where the encoder may drop or shorten its input (a normalizer that strips accents, unknown
words), there is no bound.

`check_growth` refuses a tokenizer.json that would make a text much longer before it is tokenized, or after: a model's
files are untrusted.
"""

from __future__ import annotations

import base64
import binascii
import json
import string
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Struct
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE

from ingot.errors import ModelError

_CLASSES: Final = tuple(
    chars.encode() for chars in (string.ascii_letters, string.digits, string.whitespace, string.punctuation)
)
_COUNT_CHUNK: Final = 1 << 18
_ASCII: Final = bytes(range(128))
_BYTES_BEYOND_ASCII: Final = bytes(range(128, 256))
_BYTES_OUTSIDE_UTF8: Final = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})  # bytes that no text has
_COMPOSED: Final = 3  # bytes that composing characters makes into one: three letters of Hangul, a syllable
_KEEPING_BEHAVIOURS: Final = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")


class LazyTokenFloor:
    """The floor of one vocabulary, computed when it is first needed. For any thread."""

    def __init__(self, find: Callable[[], TokenFloor | None]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._floor: TokenFloor | None = None
        self._computed = False

    def least(self, text: str) -> int:
        """No encoding of `text` has fewer tokens than this; 0 where there is no bound."""
        with self._lock:
            if not self._computed:
                self._floor, self._computed = self._find(), True
        return 0 if self._floor is None else self._floor.least(text)


@dataclass(frozen=True, slots=True)
class TokenFloor:
    """`most`: of letters, digits, white space, punctuation, bytes beyond ASCII and bytes at all, the most in any one
    token; 0 where that is unlimited. `composes`: characters may be composed before they are encoded."""

    most: tuple[int, ...]
    composes: bool = False

    @classmethod
    def of(cls, library: Library, spelled: Iterable[bytes]) -> TokenFloor | None:
        """That of a library whose tokens stand for these bytes. None where there is none."""
        composes, lost = _composes_characters(library.normalizer), _bytes_without_token(library)
        if composes is None or lost is None or not _keeps_all(library.pre_tokenizer):
            return None
        counts = _most_per_class(spelled)
        # Some tokens take the white space around them along, however much there is.
        added = library.get_added_tokens_decoder().values()
        if any(token.lstrip or token.rstrip for token in added):
            counts[2] = 0
        # What has no token is left out, however much of it there is.
        missing = [any(byte in lost for byte in chars) for chars in (*_CLASSES, _BYTES_BEYOND_ASCII, bytes(range(256)))]
        return cls(tuple(0 if some else count for count, some in zip(counts, missing, strict=True)), composes)

    def least(self, text: str) -> int:
        """No encoding of `text` has fewer tokens than this."""
        counts = _count_classes(text.encode("utf-8", "replace"))
        if self.composes and not text.isascii():
            # An ASCII character can be composed only with one beyond ASCII.
            *ascii, other, all_bytes = counts
            beyond = len(text) - sum(ascii)
            counts = [*(max(0, count - beyond) for count in ascii), other // _COMPOSED, all_bytes // _COMPOSED]
        return max(-(-count // most) if most else 0 for count, most in zip(counts, self.most, strict=True))


def _count_classes(data: bytes) -> list[int]:
    """How many bytes of each class there are. Piece by piece, as nothing else runs while one is counted."""
    pieces = [data[at : at + _COUNT_CHUNK] for at in range(0, len(data), _COUNT_CHUNK)]
    counts = [sum(len(piece) - len(piece.translate(None, chars)) for piece in pieces) for chars in _CLASSES]
    return [*counts, sum(len(piece.translate(None, _ASCII)) for piece in pieces), len(data)]


def _most_per_class(tokens: Iterable[bytes]) -> list[int]:
    """The most of each class in any one of them, of which there may be hundreds of thousands."""
    present = [token for token in tokens if token]
    data = np.frombuffer(b"".join(present), np.uint8)
    begins = np.cumsum([0, *map(len, present)])[:-1]
    most = []
    for chars in (*_CLASSES, _BYTES_BEYOND_ASCII, _ASCII + _BYTES_BEYOND_ASCII):
        counted = np.zeros(256, np.int32)
        counted[list(chars)] = 1
        most.append(int(np.add.reduceat(counted[data], begins).max()) if present else 0)
    return most


def _composes_characters(normalizer: Any) -> bool | None:
    """Whether characters are composed; None where a normalizer may leave out or shorten more than that."""
    found = [_step_composes(step) for step in component_steps(normalizer, "normalizers")]
    return None if None in found else any(found)


def _step_composes(step: Mapping[str, Any]) -> bool | None:
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
    for step in component_steps(pre_tokenizer, "pretokenizers"):
        keeps = step["type"] in ("ByteLevel", "Metaspace", "Digits")
        if not keeps and not (step["type"] == "Split" and step["behavior"] in _KEEPING_BEHAVIOURS):
            return False
    return True


def _bytes_without_token(library: Library) -> frozenset[int] | None:
    """Bytes that have no token. None where more than single bytes may be unknown."""
    model = library.model
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    kinds = [step["type"] for step in component_steps(library.pre_tokenizer, "pretokenizers")]
    if not model.byte_fallback and "ByteLevel" not in kinds:
        return None
    names = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    if not model.byte_fallback:
        names = {byte: char for char, byte in BYTE_ALPHABET.items()}
    lost = frozenset(byte for byte, name in names.items() if library.token_to_id(name) is None) - _BYTES_OUTSIDE_UTF8
    return None if lost and model.unk_token is not None else lost


def component_steps(component: Any, within: str) -> list[dict[str, Any]]:
    """What a component does, one after another."""
    state: dict[str, Any] = {"type": "Sequence", within: []}
    if component is not None:
        state = json.loads(component.__getstate__())
    if state["type"] != "Sequence":
        return [state]
    return [inner for step in state[within] for inner in ([step] if step["type"] != "Sequence" else step[within])]


MOST_GROWTH: Final = 256.0  # times; those of real models stay under 70


class _TextSteps(Struct):
    """What rewrites text, of all that is in the file."""

    normalizer: Any = None
    decoder: Any = None


def check_growth(path: Path) -> None:
    """Raises ModelError, before the library reads the file, as it already rewrites some texts of its own then."""
    try:
        steps = msgspec.json.decode(path.read_bytes(), type=_TextSteps)
        found = max(step_growth(steps.normalizer), step_growth(steps.decoder))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ModelError("tokenizer.json cannot be read: it is not valid JSON of a tokenizer") from None
    if found > MOST_GROWTH:
        raise ModelError(
            "tokenizer.json cannot be used: its normalizer or decoder makes texts hundreds of times longer"
        )


def step_growth(step: Any) -> float:
    """The most times by which a step makes a text longer, nearly."""
    match step:
        case {"type": "Sequence"}:
            steps = step.get("normalizers") or step.get("decoders")
            product = 1.0
            for each in steps if isinstance(steps, list) else ():
                product = min(product * step_growth(each), 2 * MOST_GROWTH)
            return product
        case {"type": "Replace", "content": str(content), "pattern": {"String": str(literal)}} if literal:
            return max(1.0, len(content) / len(literal))
        case {"type": "Replace", "content": str(text)} | {"type": "Prepend", "prepend": str(text)}:
            return 1.0 + len(text)  # a regular expression may match nothing at all, everywhere
        case {"type": "Precompiled"}:
            try:
                raw = base64.b64decode(step.get("precompiled_charsmap") or "", validate=True)
            except (binascii.Error, ValueError, TypeError):
                return 1.0  # the library refuses it
            # The size of an index, the index, then what replaces each character, ended by zeros.
            begin = 4 + int.from_bytes(raw[:4], "little")
            return float(max(1, *map(len, raw[begin:].split(b"\0"))))
    return 1.0


def make_byte_alphabet() -> dict[str, int]:
    """Printable bytes stand for themselves, the others for U+0100 and on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_ALPHABET: Final = make_byte_alphabet()
