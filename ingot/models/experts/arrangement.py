"""The native kernels' order of quantised weights, in plain bytes: what a reader thread may do.

The kernels put a layer in order when it is loaded, on the engine thread, one number after another. Of weights with 4 or
8 bits, and of mxfp4, that order is a transposition of words of four bytes, within tiles of rows, with the numbers in a
word rearranged. How many rows a tile has and how bytes are stored depends on the processor: `find_arrangement` tries
what there is, and takes none that does not give the kernels' own bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import mlx.core as mx
import numpy as np

from ingot.dataclass import dataclass

Numbers = np.ndarray[Any, Any]
TILES: Final = (16, 8, 4, 32)
_MXFP4: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int16) + 12
"""Doubled, and with nought in the middle."""
_CACHED: Final = 1 << 14
"""Words that are rearranged at a time, and stay in a processor's cache meanwhile."""
_MXFP4_PAIRS: Final = (_MXFP4[np.arange(256) & 15] | _MXFP4[np.arange(256) >> 4] << 8).astype(np.uint16)


@dataclass(frozen=True, slots=True)
class PackedArrangement:
    """Of one matrix. `bits` are those in the file."""

    rows: int
    tile: int
    flipped: bool
    """Bytes have their highest bit inverted."""
    bits: int
    mxfp4: bool

    def quanta(self, stored: Numbers, out: Numbers) -> None:
        """`stored` and `out` are bytes."""
        words = _MXFP4_PAIRS[stored].view(np.uint32) if self.mxfp4 else stored.view(np.uint32)
        arranged = out.view(np.uint32)
        self._transpose(words, arranged)
        if self.bits == 4 and not self.mxfp4:
            for begin in range(0, arranged.size, _CACHED):
                _put_evens_first(arranged[begin : begin + _CACHED])
        elif self.flipped:
            arranged ^= np.uint32(0x80808080)

    def factors(self, stored: Numbers, dtype: mx.Dtype, out: Numbers) -> None:
        """Scales or biases of groups, in the number format of `out`, which are floats."""
        self._transpose(as_floats(stored, dtype), out)

    def mxfp4_factors(self, stored: Numbers, scales: Numbers, biases: Numbers) -> None:
        halves = np.ldexp(np.float32(1), stored.astype(np.int32) - 128)
        self._transpose(halves, scales)
        self._transpose(-halves * np.float32(12), biases)

    def _transpose(self, numbers: Numbers, out: Numbers) -> None:
        """[rows, n] to [tiles, n, rows of a tile]; what fills up the last tile is nought."""
        whole, left = divmod(self.rows, self.tile)
        numbers = numbers.reshape(self.rows, -1)
        tiled = out.reshape(-1, numbers.shape[1], self.tile)
        tiled[:whole] = numbers[: whole * self.tile].reshape(whole, self.tile, -1).transpose(0, 2, 1)
        if left:
            tiled[whole] = 0
            tiled[whole, :, :left] = numbers[whole * self.tile :].T


def _put_evens_first(words: Numbers) -> None:
    """Of eight numbers in a word, each of the first four comes before that of the others with its place."""
    high = words >> np.uint32(16)
    words &= np.uint32(0xFFFF)
    more = np.empty_like(words)
    for half in (words, high):
        for shift, mask in ((8, 0x00FF00FF), (4, 0x0F0F0F0F)):
            np.left_shift(half, np.uint32(shift), out=more)
            half |= more
            half &= np.uint32(mask)
    high <<= np.uint32(4)
    words |= high


def as_floats(stored: Numbers, dtype: mx.Dtype) -> Numbers:
    """Floats of 16 or 32 bits, from their bytes, as numbers that lose nothing."""
    if dtype == mx.bfloat16:
        wide: Numbers = stored.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32)
    return stored.view(np.float16 if dtype == mx.float16 else np.float32)


def find_arrangement(
    packing: Mapping[str, Any], rows: int, stored: Numbers, arranged: Numbers
) -> PackedArrangement | None:
    """The one that gives a matrix's quanta, as the kernels have `arranged` them, from those of the file; None where
    none does, or where no vector operations are known for it."""
    mxfp4 = packing["mode"] == "mxfp4"
    if not mxfp4 and packing["bits"] not in (4, 8):
        return None
    for tile in TILES:
        for flipped in (False, True):
            found = PackedArrangement(rows, tile, flipped, packing["bits"], mxfp4)
            if arranged.size == -(-rows // tile) * tile * (stored.size // rows) * (2 if mxfp4 else 1):
                out = np.empty_like(arranged)
                found.quanta(stored, out)
                if np.array_equal(out, arranged):
                    return found
    return None
