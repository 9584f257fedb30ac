"""Turns GGUF weight blocks into what MLX holds: packed integers with scales and biases, or plain floats.

GGUF blocks of 32 weights that share a scale (and a minimum) are the same thing as MLX's affine groups of 32, so they
are repacked bit for bit: value = code * scale + bias. MXFP4 is the same thing in both. The K formats count scales in
units, which MLX does not: matrices keep their blocks, and become what the device takes when they are loaded
(`gguf/weights`).

Formats with tables of values (IQ, TQ) are rounded to the even steps of MLX's affine groups. Most of their tables are
even steps already, or nearly: then each group keeps its own step, and every value becomes the nearest code. Formats in
`EXACT_LATTICES` keep every value but for the rounding of a step to 16 bits; the error of the others is small compared
with that of quantising to them, and `LATTICE_ERRORS` states it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import IQ4_NL, dequantize

QUANT_GROUP: Final = 32  # weights that share a scale
QUANT_SUPER: Final = 256  # weights in a block of the K and IQ formats
BLOCKS_KEY: Final = "gguf_blocks"
"""Where config.json says which modules hold blocks, and of which kind."""

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
EXACT_LATTICES: Final = frozenset({Kind.TQ1_0, Kind.TQ2_0, Kind.IQ1_S, Kind.IQ3_S})
LATTICE_ERRORS: Final[dict[Kind, float]] = {
    Kind.IQ1_M: 0.1,
    Kind.IQ2_XXS: 0.03,
    Kind.IQ2_XS: 0.1,
    Kind.IQ2_S: 0.1,
    Kind.IQ3_XXS: 0.02,
    Kind.IQ4_NL: 0.015,
    Kind.IQ4_XS: 0.015,
}
"""The most that a tensor's values change, as a share of their size (root mean squares)."""

DecodedBlocks = tuple[np.ndarray, np.ndarray, np.ndarray]  # codes (blocks, weights); scales, biases (blocks, groups)
GroupSteps = tuple[np.ndarray, np.ndarray]  # the step and the lowest value of each group, (blocks, groups)


def decode_lattice(blocks: np.ndarray, kind: Kind) -> DecodedBlocks:
    if kind in _CROOKED:
        return _crooked(blocks, kind)
    values = dequantize(blocks, kind).reshape(len(blocks), -1, QUANT_GROUP)
    steps, lows = _STEPS[kind](blocks) if kind in _STEPS else _even_steps(values, LATTICE_BITS[kind])
    scales, biases = _rounded_to_half(steps), _rounded_to_half(lows)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps_up = (values - biases[..., None]) / scales[..., None]
    steps_up[~np.isfinite(steps_up)] = 0  # of a group without a step every value is the lowest
    codes = np.clip(np.rint(steps_up), 0, 2 ** LATTICE_BITS[kind] - 1).astype(np.uint8)
    return codes.reshape(len(blocks), -1), scales, biases


def _rounded_to_half(values: np.ndarray) -> np.ndarray:
    """Rounded to float16, except where that would be subnormal or overflow."""
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16).astype(np.float32)
    fine = (np.abs(values) >= np.float32(2**-14)) & np.isfinite(halves) | (values == 0)
    return np.where(fine, halves, values).astype(np.float32)


def _even_steps(values: np.ndarray, bits: int) -> GroupSteps:
    """Formats whose scales change within a group: its range in equal steps."""
    lows = values.min(axis=-1)
    return (values.max(axis=-1) - lows) / np.float32(2**bits - 1), lows


def _words(columns: np.ndarray, kind: str) -> np.ndarray:
    return np.ascontiguousarray(columns).view(kind)


def _byte_nibbles(columns: np.ndarray) -> np.ndarray:
    """Each byte as its low half, then its high half."""
    return np.stack([columns & np.uint8(0x0F), columns >> np.uint8(4)], axis=-1).reshape(len(columns), -1)


def _ternary(blocks: np.ndarray) -> GroupSteps:
    unit = np.repeat(_halves(blocks[:, -2:]), QUANT_SUPER // QUANT_GROUP, axis=1)
    return unit, -unit


def _iq1_s(blocks: np.ndarray) -> GroupSteps:
    """-1, 0 and 1, all shifted by an eighth up or down."""
    packed = _words(blocks[:, 34:50], "<u2")
    unit = _halves(blocks[:, :2]) * (2 * (packed >> 12 & 7) + 1).astype(np.float32)
    shift = np.where(packed & 0x8000, np.float32(-0.125), np.float32(0.125))
    return unit, unit * (shift - 1)


def _iq2_xxs(blocks: np.ndarray) -> GroupSteps:
    """8, 25 and 43, with signs."""
    packed = _words(blocks[:, 2:66], "<u4")[:, 1::2]
    return _around_zero(_halves(blocks[:, :2]) * ((packed >> 28) + np.float32(0.5)) * np.float32(0.25), 17.03, 6)


def _iq3_xxs(blocks: np.ndarray) -> GroupSteps:
    """4, 12, 20, 28, 36, 44, 52 and 62, with signs."""
    packed = _words(blocks[:, 66:98], "<u4")
    return _around_zero(_halves(blocks[:, :2]) * ((packed >> 28) + np.float32(0.5)) * np.float32(0.5), 8.088, 16)


def _iq3_s(blocks: np.ndarray) -> GroupSteps:
    """The odd numbers to 15, with signs."""
    unit = _halves(blocks[:, :2]) * (1 + 2 * _byte_nibbles(blocks[:, 106:110])).astype(np.float32)
    return _around_zero(unit, 2.0, 16)


def _crooked(blocks: np.ndarray, kind: Kind) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """IQ4: sixteen numbers, closer to each other around zero, which these 64 even steps fit best."""
    begin, units = _CROOKED[kind]
    quanta = blocks[:, begin:].reshape(len(blocks), -1, 1, QUANT_GROUP // 2)
    codes = _IQ4_CODES[np.concatenate([quanta & np.uint8(0x0F), quanta >> np.uint8(4)], axis=2)]
    unit = units(blocks)
    return codes.reshape(len(blocks), -1), _rounded_to_half(unit * _CROOKED_STEP), _rounded_to_half(unit * _CROOKED_LOW)


_CROOKED_STEP, _CROOKED_LOW = np.float32(3.9706), np.float32(-125.47)
_IQ4_CODES: Final = np.rint((np.array(IQ4_NL.kvalues) - _CROOKED_LOW) / _CROOKED_STEP).astype(np.uint8)


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    return _halves(blocks[:, :2])


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    high = _words(blocks[:, 2:4], "<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (_byte_nibbles(blocks[:, 4:8]) | high.astype(np.uint8) << np.uint8(4)).astype(np.float32) - 32
    return _halves(blocks[:, :2]) * scales


# Where the quanta begin, and what gives the unit of each group.
_CROOKED: Final[dict[Kind, tuple[int, Callable[[np.ndarray], np.ndarray]]]] = {
    Kind.IQ4_NL: (2, _iq4_nl),
    Kind.IQ4_XS: (8, _iq4_xs),
}


def _around_zero(unit: np.ndarray, step: float, count: int) -> GroupSteps:
    steps = (unit * np.float32(step)).astype(np.float32)
    return steps, steps * np.float32(-(count - 1) / 2)


_STEPS: Final[dict[Kind, Callable[[np.ndarray], GroupSteps]]] = {
    Kind.TQ1_0: _ternary,
    Kind.TQ2_0: _ternary,
    Kind.IQ1_S: _iq1_s,
    Kind.IQ2_XXS: _iq2_xxs,
    Kind.IQ3_XXS: _iq3_xxs,
    Kind.IQ3_S: _iq3_s,
}


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows in MLX's affine form: `weight` uint32, `scales` and `biases` float32, one of each per group.

    Of mxfp4 the scales are exponents, uint8, and there are no biases.
    """

    weight: np.ndarray
    scales: np.ndarray
    biases: np.ndarray | None


def pack_blocks(raw: np.ndarray, kind: Kind) -> PackedRows:
    """Repacks rows of blocks (`raw`: one line of bytes a row); `kind` is one of PACKED_BITS."""
    rows = raw.shape[0]
    if kind == Kind.MXFP4:
        return _mxfp4(raw)
    codes, scales, biases = _DECODERS[kind](raw.reshape(-1, GGML_QUANT_SIZES[kind][1]))
    return PackedRows(
        weight=_pack_codes(codes.reshape(rows, -1), PACKED_BITS[kind]),
        scales=scales.reshape(rows, -1),
        biases=biases.reshape(rows, -1),
    )


def packed_format(kind: Kind) -> dict[str, Any]:
    """The quantised form of `kind`, as a model's config states it."""
    return {"group_size": QUANT_GROUP, "bits": PACKED_BITS[kind], "mode": "mxfp4" if kind == Kind.MXFP4 else "affine"}


def _mxfp4(raw: np.ndarray) -> PackedRows:
    """Blocks have an exponent and 32 codes of 4 bits; MLX has the exponents in a separate array."""
    blocks = raw.reshape(-1, GGML_QUANT_SIZES[Kind.MXFP4][1])
    codes = _nibbles(blocks[:, 1:], 16)
    return PackedRows(_pack_codes(codes.reshape(len(raw), -1), 4), blocks[:, 0].reshape(len(raw), -1), None)


def dequantize_rows(raw: np.ndarray, kind: Kind) -> np.ndarray:
    """Rows as floats: F32 and F16 as they are, BF16 as float32 (exact), the rest dequantised to float32."""
    if kind == Kind.F16:
        return raw.view(np.float16)
    if kind == Kind.F32:
        return raw.view(np.float32)
    return dequantize(raw, kind)


def narrowest_float(values: np.ndarray) -> type[np.float16] | type[np.float32]:
    """float16 where it holds every one of these float32 values exactly, else float32."""
    with np.errstate(over="ignore"):
        exact = np.array_equal(values.astype(np.float16).astype(np.float32), values)
    return np.float16 if exact else np.float32


def _pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """A little-endian stream of `bits`-wide codes, in words of 32 bits."""
    if bits == 8:
        return codes.view(np.uint32)
    if bits == 4:
        return (codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)).view(np.uint32)
    # Eight codes fill `bits` whole bytes: the low bytes of one 64-bit word.
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), "<u8")
    for index in range(8):
        words |= codes[:, index::8].astype("<u8") << np.uint64(index * bits)
    stream = words.view(np.uint8).reshape(*words.shape, 8)[..., :bits]
    return np.ascontiguousarray(stream).reshape(codes.shape[0], -1).view(np.uint32)


def _halves(blocks: np.ndarray) -> np.ndarray:
    """The float16 numbers in these columns of bytes, as float32."""
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _nibbles(low_then_high: np.ndarray, span: int) -> np.ndarray:
    """Codes of 4 bits: each run of `span` bytes holds `span` codes in its low nibbles, then `span` in the high."""
    runs = low_then_high.reshape(low_then_high.shape[0], -1, 1, span)
    codes = np.concatenate([runs & np.uint8(0x0F), runs >> np.uint8(4)], axis=2)
    return codes.reshape(low_then_high.shape[0], -1)


def _fifth_bits(blocks: np.ndarray) -> np.ndarray:
    """Q5_0 and Q5_1 have the fifth bit of weight i in bit i of a 32-bit word."""
    return np.unpackbits(blocks, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: np.ndarray) -> DecodedBlocks:
    scales = _halves(blocks[:, :2])
    return _nibbles(blocks[:, 2:], 16), scales, scales * np.float32(-8)


def _q4_1(blocks: np.ndarray) -> DecodedBlocks:
    return _nibbles(blocks[:, 4:], 16), _halves(blocks[:, :2]), _halves(blocks[:, 2:4])


def _q5_0(blocks: np.ndarray) -> DecodedBlocks:
    scales = _halves(blocks[:, :2])
    codes = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return codes, scales, scales * np.float32(-16)


def _q5_1(blocks: np.ndarray) -> DecodedBlocks:
    codes = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return codes, _halves(blocks[:, :2]), _halves(blocks[:, 2:4])


def _q8_0(blocks: np.ndarray) -> DecodedBlocks:
    scales = _halves(blocks[:, :2])
    # Flipping the top bit adds 128 to a signed byte and makes it unsigned.
    return blocks[:, 2:] ^ np.uint8(0x80), scales, scales * np.float32(-128)


def _q4_k(blocks: np.ndarray) -> DecodedBlocks:
    scales, biases = _k_scales(blocks)
    return _nibbles(blocks[:, 16:], 32), scales, biases


def _q5_k(blocks: np.ndarray) -> DecodedBlocks:
    scales, biases = _k_scales(blocks)
    # Bit g of byte i is the fifth bit of weight i of group g.
    high = blocks[:, None, 16:48] >> np.arange(QUANT_SUPER // QUANT_GROUP, dtype=np.uint8)[None, :, None]
    high = (high & np.uint8(1)) << np.uint8(4)
    return _nibbles(blocks[:, 48:], 32) | high.reshape(-1, QUANT_SUPER), scales, biases


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and minima of 6 bits in 12 bytes, in units of the block's two float16 numbers."""
    first, second, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    top = np.uint8(0x30)
    scales = np.concatenate([first & 0x3F, (mixed & 0x0F) | (first >> 2 & top)], axis=1)
    minima = np.concatenate([second & 0x3F, (mixed >> 4) | (second >> 2 & top)], axis=1)
    unit, minimum_unit = _halves(blocks[:, :2]), _halves(blocks[:, 2:4])
    return unit * scales.astype(np.float32), -(minimum_unit * minima.astype(np.float32))


_DECODERS: dict[Kind, Callable[[np.ndarray], DecodedBlocks]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q8_0: _q8_0,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    **{kind: partial(decode_lattice, kind=kind) for kind in LATTICE_BITS},
}

PACKED_BITS: dict[Kind, int] = {
    Kind.Q4_0: 4,
    Kind.Q4_1: 4,
    Kind.Q4_K: 4,
    Kind.Q5_0: 5,
    Kind.Q5_1: 5,
    Kind.Q5_K: 5,
    Kind.Q8_0: 8,
    Kind.MXFP4: 4,
    **LATTICE_BITS,
}
BLOCK_BITS: dict[Kind, int] = {Kind.Q2_K: 2, Kind.Q3_K: 3, Kind.Q4_K: 4, Kind.Q5_K: 5, Kind.Q6_K: 6}
"""Formats with scales in two levels; a matrix in one of them keeps its blocks."""
SMALL_BLOCKS: dict[Kind, bool] = {
    Kind.Q4_0: False,
    Kind.Q4_1: True,
    Kind.Q5_0: False,
    Kind.Q5_1: True,
    Kind.Q8_0: False,
}
"""Formats of blocks of 32 weights, which MLX packs alike, and whether a block states its minimum: else that is the
scale times the number of codes below zero."""
DENSE_KINDS = frozenset({Kind.F32, Kind.F16, Kind.BF16, Kind.Q2_K, Kind.Q3_K, Kind.Q6_K})
KNOWN_KINDS = DENSE_KINDS | PACKED_BITS.keys()

_UNITS = {
    **{kind: (0, 2) if minima else (0,) for kind, minima in SMALL_BLOCKS.items()},
    **{Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)},
}


def block_units(raw: np.ndarray, kind: Kind) -> np.ndarray:
    """The float16 units of the scales of blocks. `kind` is one of BLOCK_BITS or SMALL_BLOCKS."""
    blocks = raw.reshape(-1, GGML_QUANT_SIZES[kind][1])
    return np.concatenate([_halves(blocks[:, offset : offset + 2]) for offset in _UNITS[kind]], axis=1)


def rope_head_order(rows: int, head: int) -> np.ndarray:
    """Which of so many rows comes first, second..., where each head's come in interleaved rotary order."""
    return np.arange(rows).reshape(-1, head // 2, 2).swapaxes(1, 2).ravel()
