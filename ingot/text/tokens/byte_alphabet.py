"""GPT-2's spelling of bytes, which most vocabularies share."""

from __future__ import annotations

from typing import Final


def byte_alphabet() -> dict[str, int]:
    """Printable bytes stand for themselves, the others for U+0100 and on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


ALPHABET: Final = byte_alphabet()
