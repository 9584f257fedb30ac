"""Turns GGUF weight blocks into what MLX holds: packed integers with scales and biases, or plain floats.

GGUF blocks of 32 weights that share a scale (and a minimum) are the same thing as MLX's affine groups of 32, so
they are repacked bit for bit: value = code * scale + bias. MXFP4 is the same thing in both. The K formats count scales
in units, which MLX does not: matrices keep their blocks, and become what the device takes when they are loaded
(`block_layers`). Formats of tables are put onto even steps (`lattices`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from ingot.models.gguf.lattices import LATTICE_BITS, on_lattice

GROUP = 32  # weights that share a scale
SUPER = 256  # weights in a block of the K formats

Decoded = tuple[np.ndarray, np.ndarray, np.ndarray]  # codes (blocks, weights); scales, biases (blocks, groups)


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows in MLX's affine form: `weight` uint32, `scales` and `biases` float32, one of each per group.

    Of mxfp4 the scales are exponents, uint8, and there are no biases.
    """

    weight: np.ndarray
    scales: np.ndarray
    biases: np.ndarray | None


def pack(raw: np.ndarray, kind: Kind) -> Packed:
    """Repacks rows of blocks (`raw`: one line of bytes a row); `kind` is one of PACKED_BITS."""
    rows = raw.shape[0]
    if kind == Kind.MXFP4:
        return _mxfp4(raw)
    codes, scales, biases = _DECODERS[kind](raw.reshape(-1, GGML_QUANT_SIZES[kind][1]))
    return Packed(
        weight=_pack_codes(codes.reshape(rows, -1), PACKED_BITS[kind]),
        scales=scales.reshape(rows, -1),
        biases=biases.reshape(rows, -1),
    )


def packed_format(kind: Kind) -> dict[str, Any]:
    """How a model's config names the packed form of `kind`."""
    return {"group_size": GROUP, "bits": PACKED_BITS[kind], "mode": "mxfp4" if kind == Kind.MXFP4 else "affine"}


def _mxfp4(raw: np.ndarray) -> Packed:
    """An exponent and 32 codes of 4 bits a block; MLX has the exponents apart, and the codes in their order."""
    blocks = raw.reshape(-1, GGML_QUANT_SIZES[Kind.MXFP4][1])
    codes = _nibbles(blocks[:, 1:], 16)
    return Packed(_pack_codes(codes.reshape(len(raw), -1), 4), blocks[:, 0].reshape(len(raw), -1), None)


def dense(raw: np.ndarray, kind: Kind) -> np.ndarray:
    """Rows as floats: F32 and F16 as they are, BF16 as float32 (exact), the rest dequantised to float32."""
    if kind == Kind.F16:
        return raw.view(np.float16)
    if kind == Kind.F32:
        return raw.view(np.float32)
    return dequantize(raw, kind)


def narrowest(values: np.ndarray) -> type[np.float16] | type[np.float32]:
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
    for place in range(8):
        words |= codes[:, place::8].astype("<u8") << np.uint64(place * bits)
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
    """Q5_0 and Q5_1 keep the fifth bit of weight i in bit i of a 32-bit word."""
    return np.unpackbits(blocks, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: np.ndarray) -> Decoded:
    scales = _halves(blocks[:, :2])
    return _nibbles(blocks[:, 2:], 16), scales, scales * np.float32(-8)


def _q4_1(blocks: np.ndarray) -> Decoded:
    return _nibbles(blocks[:, 4:], 16), _halves(blocks[:, :2]), _halves(blocks[:, 2:4])


def _q5_0(blocks: np.ndarray) -> Decoded:
    scales = _halves(blocks[:, :2])
    codes = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return codes, scales, scales * np.float32(-16)


def _q5_1(blocks: np.ndarray) -> Decoded:
    codes = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return codes, _halves(blocks[:, :2]), _halves(blocks[:, 2:4])


def _q8_0(blocks: np.ndarray) -> Decoded:
    scales = _halves(blocks[:, :2])
    # Flipping the top bit adds 128 to a signed byte and makes it unsigned.
    return blocks[:, 2:] ^ np.uint8(0x80), scales, scales * np.float32(-128)


def _q4_k(blocks: np.ndarray) -> Decoded:
    scales, biases = _k_scales(blocks)
    return _nibbles(blocks[:, 16:], 32), scales, biases


def _q5_k(blocks: np.ndarray) -> Decoded:
    scales, biases = _k_scales(blocks)
    # Bit g of byte i is the fifth bit of weight i of group g.
    high = blocks[:, None, 16:48] >> np.arange(SUPER // GROUP, dtype=np.uint8)[None, :, None]
    high = (high & np.uint8(1)) << np.uint8(4)
    return _nibbles(blocks[:, 48:], 32) | high.reshape(-1, SUPER), scales, biases


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and minima of 6 bits in 12 bytes, in units of the block's two float16 numbers."""
    first, second, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    top = np.uint8(0x30)
    scales = np.concatenate([first & 0x3F, (mixed & 0x0F) | (first >> 2 & top)], axis=1)
    minima = np.concatenate([second & 0x3F, (mixed >> 4) | (second >> 2 & top)], axis=1)
    unit, minimum_unit = _halves(blocks[:, :2]), _halves(blocks[:, 2:4])
    return unit * scales.astype(np.float32), -(minimum_unit * minima.astype(np.float32))


_DECODERS: dict[Kind, Callable[[np.ndarray], Decoded]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q8_0: _q8_0,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    **{kind: partial(on_lattice, kind=kind) for kind in LATTICE_BITS},
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
"""Formats with scales in two levels; a matrix of one keeps its blocks."""
SMALL: dict[Kind, bool] = {Kind.Q4_0: False, Kind.Q4_1: True, Kind.Q5_0: False, Kind.Q5_1: True, Kind.Q8_0: False}
"""Formats of blocks of 32 weights, which MLX packs alike, and whether a block states its minimum: else that is the
scale, times as many as there are codes below nought."""
BLOCKS_KEY = "gguf_blocks"
"""Where config.json says which modules hold blocks, and of which kind."""
DENSE_KINDS = frozenset({Kind.F32, Kind.F16, Kind.BF16, Kind.Q2_K, Kind.Q3_K, Kind.Q6_K})
KNOWN_KINDS = DENSE_KINDS | PACKED_BITS.keys()

_UNITS = {
    **{kind: (0, 2) if minima else (0,) for kind, minima in SMALL.items()},
    **{Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)},
}


def units(raw: np.ndarray, kind: Kind) -> np.ndarray:
    """The numbers of which the factors of blocks are multiples. `kind` is one of BLOCK_BITS or SMALL."""
    blocks = raw.reshape(-1, GGML_QUANT_SIZES[kind][1])
    return np.concatenate([_halves(blocks[:, place : place + 2]) for place in _UNITS[kind]], axis=1)


def head_order(rows: int, head: int) -> np.ndarray:
    """Which of so many rows comes first, second..., where each head's come in interleaved rotary order."""
    return np.arange(rows).reshape(-1, head // 2, 2).swapaxes(1, 2).ravel()
