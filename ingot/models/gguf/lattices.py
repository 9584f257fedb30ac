"""GGUF formats that look values up in tables (IQ, TQ), put onto the even steps of MLX's affine groups.

Most of their tables are even steps already, or nearly: then each group keeps its own step and every value the nearest
place on it. `EXACT` formats keep every value but for the rounding of a step to 16 bits; what the others add is small
beside the error that they were made with, and `ADDED` states it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import IQ4_NL, dequantize

GROUP: Final = 32
SUPER: Final = 256

LATTICE_BITS: Final[dict[Kind, int]] = {
    Kind.TQ1_0: 2,
    Kind.TQ2_0: 2,
    Kind.IQ1_S: 2,
    Kind.IQ1_M: 4,
    Kind.IQ2_XXS: 3,
    Kind.IQ2_XS: 4,
    Kind.IQ2_S: 4,
    Kind.IQ3_XXS: 4,
    Kind.IQ3_S: 4,
    Kind.IQ4_NL: 6,
    Kind.IQ4_XS: 6,
}
EXACT: Final = frozenset({Kind.TQ1_0, Kind.TQ2_0, Kind.IQ1_S, Kind.IQ3_S})
ADDED: Final[dict[Kind, float]] = {
    Kind.IQ1_M: 0.1,
    Kind.IQ2_XXS: 0.03,
    Kind.IQ2_XS: 0.1,
    Kind.IQ2_S: 0.1,
    Kind.IQ3_XXS: 0.02,
    Kind.IQ4_NL: 0.015,
    Kind.IQ4_XS: 0.015,
}
"""The most that a tensor's values move by, as a share of their size (root mean squares)."""

Steps = tuple[np.ndarray, np.ndarray]  # the step and the lowest place of each group, (blocks, groups)


def on_lattice(blocks: np.ndarray, kind: Kind) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks of bytes as codes (blocks, weights) and each group's scale and bias (blocks, groups)."""
    if kind in _CROOKED:
        return _crooked(blocks, kind)
    values = dequantize(blocks, kind).reshape(len(blocks), -1, GROUP)
    steps, lows = _STEPS[kind](blocks) if kind in _STEPS else _spread(values, LATTICE_BITS[kind])
    scales, biases = _rounded(steps), _rounded(lows)
    with np.errstate(divide="ignore", invalid="ignore"):
        places = (values - biases[..., None]) / scales[..., None]
    places[~np.isfinite(places)] = 0  # of a group without a step every value is the lowest
    codes = np.clip(np.rint(places), 0, 2 ** LATTICE_BITS[kind] - 1).astype(np.uint8)
    return codes.reshape(len(blocks), -1), scales, biases


def _rounded(values: np.ndarray) -> np.ndarray:
    """Numbers that float16 holds, where it holds them with all of its digits."""
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16).astype(np.float32)
    fine = (np.abs(values) >= np.float32(2**-14)) & np.isfinite(halves) | (values == 0)
    return np.where(fine, halves, values).astype(np.float32)


def _spread(values: np.ndarray, bits: int) -> Steps:
    """Formats whose scales change within a group: its range in equal steps."""
    lows = values.min(axis=-1)
    return (values.max(axis=-1) - lows) / np.float32(2**bits - 1), lows


def _halves(columns: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def _words(columns: np.ndarray, kind: str) -> np.ndarray:
    return np.ascontiguousarray(columns).view(kind)


def _nibbles(columns: np.ndarray) -> np.ndarray:
    """Each byte as its low half, then its high half."""
    return np.stack([columns & np.uint8(0x0F), columns >> np.uint8(4)], axis=-1).reshape(len(columns), -1)


def _ternary(blocks: np.ndarray) -> Steps:
    unit = np.repeat(_halves(blocks[:, -2:]), SUPER // GROUP, axis=1)
    return unit, -unit


def _iq1_s(blocks: np.ndarray) -> Steps:
    """-1, 0 and 1, all shifted by an eighth one way or the other."""
    told = _words(blocks[:, 34:50], "<u2")
    unit = _halves(blocks[:, :2]) * (2 * (told >> 12 & 7) + 1).astype(np.float32)
    shift = np.where(told & 0x8000, np.float32(-0.125), np.float32(0.125))
    return unit, unit * (shift - 1)


def _iq2_xxs(blocks: np.ndarray) -> Steps:
    """8, 25 and 43, with signs."""
    told = _words(blocks[:, 2:66], "<u4")[:, 1::2]
    return _around_zero(_halves(blocks[:, :2]) * ((told >> 28) + np.float32(0.5)) * np.float32(0.25), 17.03, 6)


def _iq3_xxs(blocks: np.ndarray) -> Steps:
    """4, 12, 20, 28, 36, 44, 52 and 62, with signs."""
    told = _words(blocks[:, 66:98], "<u4")
    return _around_zero(_halves(blocks[:, :2]) * ((told >> 28) + np.float32(0.5)) * np.float32(0.5), 8.088, 16)


def _iq3_s(blocks: np.ndarray) -> Steps:
    """The odd numbers to 15, with signs."""
    unit = _halves(blocks[:, :2]) * (1 + 2 * _nibbles(blocks[:, 106:110])).astype(np.float32)
    return _around_zero(unit, 2.0, 16)


def _crooked(blocks: np.ndarray, kind: Kind) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """IQ4: sixteen numbers, closer to each other around zero, which 64 even places meet best like this."""
    begin, units = _CROOKED[kind]
    quanta = blocks[:, begin:].reshape(len(blocks), -1, 1, GROUP // 2)
    codes = _PLACES[np.concatenate([quanta & np.uint8(0x0F), quanta >> np.uint8(4)], axis=2)]
    unit = units(blocks)
    return codes.reshape(len(blocks), -1), _rounded(unit * _CROOKED_STEP), _rounded(unit * _CROOKED_LOW)


_CROOKED_STEP, _CROOKED_LOW = np.float32(3.9706), np.float32(-125.47)
_PLACES: Final = np.rint((np.array(IQ4_NL.kvalues) - _CROOKED_LOW) / _CROOKED_STEP).astype(np.uint8)


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    return _halves(blocks[:, :2])


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    high = _words(blocks[:, 2:4], "<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (_nibbles(blocks[:, 4:8]) | high.astype(np.uint8) << np.uint8(4)).astype(np.float32) - 32
    return _halves(blocks[:, :2]) * scales


# Where the quanta begin, and what gives the unit of each group.
_CROOKED: Final[dict[Kind, tuple[int, Callable[[np.ndarray], np.ndarray]]]] = {
    Kind.IQ4_NL: (2, _iq4_nl),
    Kind.IQ4_XS: (8, _iq4_xs),
}


def _around_zero(unit: np.ndarray, step: float, places: int) -> Steps:
    steps = (unit * np.float32(step)).astype(np.float32)
    return steps, steps * np.float32(-(places - 1) / 2)


_STEPS: Final[dict[Kind, Callable[[np.ndarray], Steps]]] = {
    Kind.TQ1_0: _ternary,
    Kind.TQ2_0: _ternary,
    Kind.IQ1_S: _iq1_s,
    Kind.IQ2_XXS: _iq2_xxs,
    Kind.IQ3_XXS: _iq3_xxs,
    Kind.IQ3_S: _iq3_s,
}
