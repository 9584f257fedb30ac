"""How much longer a tokenizer.json may make a text before it is tokenized, or after: little, whoever wrote it."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from ingot.errors import ModelError

MOST: Final = 256.0  # times; those of real models stay under 70


class _Steps(Struct):
    """What rewrites text, of all that is in the file."""

    normalizer: Any = None
    decoder: Any = None


def check_growth(path: Path) -> None:
    """Raises ModelError, before the library reads the file, as it already rewrites some texts of its own then."""
    try:
        steps = msgspec.json.decode(path.read_bytes(), type=_Steps)
        found = max(growth(steps.normalizer), growth(steps.decoder))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ModelError("tokenizer.json cannot be read: it is not valid JSON of a tokenizer") from None
    if found > MOST:
        raise ModelError(
            "tokenizer.json cannot be used: its normalizer or decoder makes texts hundreds of times longer"
        )


def growth(step: Any) -> float:
    """The most times by which `step` makes a text longer, nearly."""
    if not isinstance(step, Mapping):
        return 1.0
    match step.get("type"):
        case "Sequence":
            return together(step.get("normalizers") or step.get("decoders"))
        case "Replace":
            return of_replacing(step.get("pattern"), step.get("content"))
        case "Prepend":
            return 1.0 + length(step.get("prepend"))
        case "Precompiled":
            return of_table(step.get("precompiled_charsmap"))
    return 1.0


def together(steps: Any) -> float:
    product = 1.0
    for step in steps if isinstance(steps, list) else ():
        product = min(product * growth(step), 2 * MOST)
    return product


def of_replacing(pattern: Any, content: Any) -> float:
    literal = pattern.get("String") if isinstance(pattern, Mapping) else None
    if isinstance(literal, str) and literal:
        return max(1.0, length(content) / len(literal))
    return 1.0 + length(content)  # an expression may match nothing at all, everywhere


def of_table(encoded: Any) -> float:
    """A table of characters: the size of an index, the index, then what stands for each, ended by zeros."""
    try:
        raw = base64.b64decode(encoded or "", validate=True)
    except (binascii.Error, ValueError, TypeError):
        return 1.0  # the library refuses it
    begin = 4 + int.from_bytes(raw[:4], "little")
    return float(max(1, *map(len, raw[begin:].split(b"\0"))))


def length(text: Any) -> int:
    return len(text) if isinstance(text, str) else 0
