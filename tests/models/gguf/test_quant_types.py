from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from ingot.models.gguf.quant_types import (
    DENSE_KINDS,
    EXACT_LATTICES,
    LATTICE_BITS,
    LATTICE_ERRORS,
    PACKED_BITS,
    QUANT_GROUP,
    decode_lattice,
    dequantize_rows,
    narrowest_float,
    pack_blocks,
)
from tests.models.gguf.making import random_rows

ROWS, COLUMNS = 6, 512
SAME = [kind for kind in PACKED_BITS if kind not in LATTICE_BITS and kind != Kind.MXFP4]


def unpack_codes(weight: np.ndarray, bits: int) -> np.ndarray:
    """An independent reading of MLX's packing: a little-endian stream of bits."""
    stream = np.unpackbits(weight.view(np.uint8), axis=-1, bitorder="little")
    return stream.reshape(weight.shape[0], -1, bits) @ (1 << np.arange(bits))


@pytest.mark.parametrize("kind", SAME)
def test_repacking_keeps_every_value_bit_for_bit(kind: Kind) -> None:
    raw = random_rows(np.random.default_rng(1), kind, ROWS, COLUMNS)
    packed = pack_blocks(raw, kind)
    codes = unpack_codes(packed.weight, PACKED_BITS[kind]).reshape(ROWS, -1, QUANT_GROUP).astype(np.float32)
    values = (codes * packed.scales[..., None] + packed.biases[..., None]).reshape(ROWS, COLUMNS)
    np.testing.assert_array_equal(values, dequantize(raw, kind))


@pytest.mark.parametrize("kind", SAME)
def test_mlx_reads_the_packed_form_as_the_same_values(kind: Kind) -> None:
    mx = pytest.importorskip("mlx.core")
    raw = random_rows(np.random.default_rng(2), kind, ROWS, COLUMNS)
    packed = pack_blocks(raw, kind)
    read = mx.dequantize(
        mx.array(packed.weight), mx.array(packed.scales), mx.array(packed.biases), QUANT_GROUP, PACKED_BITS[kind]
    )
    largest = np.abs(packed.scales).max() * 256
    np.testing.assert_allclose(np.array(read), dequantize(raw, kind), rtol=0, atol=largest * 2**-23)


def test_mlx_reads_mxfp4_as_the_same_values() -> None:
    mx = pytest.importorskip("mlx.core")
    raw = random_rows(np.random.default_rng(2), Kind.MXFP4, ROWS, COLUMNS)
    packed = pack_blocks(raw, Kind.MXFP4)
    read = mx.dequantize(mx.array(packed.weight), mx.array(packed.scales), None, QUANT_GROUP, 4, mode="mxfp4")
    np.testing.assert_array_equal(np.array(read.astype(mx.float32)), dequantize(raw, Kind.MXFP4))


@pytest.mark.parametrize("bits", sorted(set(PACKED_BITS.values())))
def test_mlx_packs_codes_as_the_little_endian_stream_that_we_write(bits: int) -> None:
    mx = pytest.importorskip("mlx.core")
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 2**bits, (4, 64))
    codes[:, 0::32], codes[:, 1::32] = 0, 2**bits - 1  # so that each group's scale is one
    weight, scales, biases = mx.quantize(mx.array(codes.astype(np.float32)), QUANT_GROUP, bits)
    values = unpack_codes(np.array(weight), bits).reshape(4, -1, QUANT_GROUP)
    read = values * np.array(scales)[..., None] + np.array(biases)[..., None]
    np.testing.assert_allclose(read.reshape(4, 64), codes, atol=1e-3)


@pytest.mark.parametrize("kind", sorted(DENSE_KINDS - {Kind.F16, Kind.F32}))
def test_formats_that_mlx_lacks_become_the_floats_of_the_gguf_package(kind: Kind) -> None:
    raw = random_rows(np.random.default_rng(4), kind, ROWS, COLUMNS)
    np.testing.assert_array_equal(dequantize_rows(raw, kind), dequantize(raw, kind))


def test_floats_stay_as_they_are() -> None:
    values = np.random.default_rng(5).standard_normal((3, 8))
    for dtype, kind in ((np.float16, Kind.F16), (np.float32, Kind.F32)):
        raw = values.astype(dtype).view(np.uint8)
        np.testing.assert_array_equal(dequantize_rows(raw, kind), values.astype(dtype))


def test_float16_is_chosen_only_where_it_is_exact() -> None:
    assert narrowest_float(np.array([0.5, -8.0, 65504.0], np.float32)) is np.float16
    assert narrowest_float(np.array([1 + 2**-12], np.float32)) is np.float32
    assert narrowest_float(np.array([70000.0], np.float32)) is np.float32


def test_every_packed_format_has_blocks_of_whole_groups() -> None:
    assert all(GGML_QUANT_SIZES[kind][0] % QUANT_GROUP == 0 for kind in PACKED_BITS)


def blocks_of(kind: Kind, size: float = 1.0) -> np.ndarray:
    block, width = GGML_QUANT_SIZES[kind]
    return random_rows(np.random.default_rng(7), kind, 512, 2 * block, size).reshape(-1, width)


def values_of(codes: np.ndarray, scales: np.ndarray, biases: np.ndarray) -> np.ndarray:
    grouped = codes.reshape(*scales.shape, QUANT_GROUP).astype(np.float32)
    return (grouped * scales[..., None] + biases[..., None]).reshape(codes.shape)


def moved(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


def test_every_format_states_whether_it_is_exact_or_what_it_adds() -> None:
    assert EXACT_LATTICES | LATTICE_ERRORS.keys() == LATTICE_BITS.keys()
    assert not EXACT_LATTICES & LATTICE_ERRORS.keys()


@pytest.mark.parametrize("kind", sorted(EXACT_LATTICES), ids=lambda kind: kind.name)
def test_even_tables_keep_their_values_but_for_the_rounding_of_the_step(kind: Kind) -> None:
    blocks = blocks_of(kind)
    found, expected = values_of(*decode_lattice(blocks, kind)), dequantize(blocks, kind)
    np.testing.assert_allclose(found, expected, atol=np.abs(expected).max() * 2**-9)
    assert moved(found, expected) < 2**-10


@pytest.mark.parametrize("kind", sorted(LATTICE_ERRORS), ids=lambda kind: kind.name)
def test_other_tables_move_their_values_by_no_more_than_is_stated(kind: Kind) -> None:
    blocks = blocks_of(kind)
    assert moved(values_of(*decode_lattice(blocks, kind)), dequantize(blocks, kind)) < LATTICE_ERRORS[kind]


@pytest.mark.parametrize("kind", LATTICE_BITS, ids=lambda kind: kind.name)
def test_codes_fit_their_bits_and_steps_are_float16_where_that_is_fine(kind: Kind) -> None:
    codes, scales, biases = decode_lattice(blocks_of(kind), kind)
    assert codes.max() < 2 ** LATTICE_BITS[kind]
    for numbers in (scales, biases):
        halves = numbers.astype(np.float16).astype(np.float32)
        assert np.array_equal(np.where(np.abs(numbers) < 2**-14, numbers, halves), numbers)


@pytest.mark.parametrize("kind", LATTICE_BITS, ids=lambda kind: kind.name)
def test_blocks_of_zeros_stay_zeros_and_tiny_ones_keep_their_size(kind: Kind) -> None:
    nothing = np.zeros((3, GGML_QUANT_SIZES[kind][1]), np.uint8)
    assert not values_of(*decode_lattice(nothing, kind)).any()
    tiny = blocks_of(kind, 1e-2)
    assert moved(values_of(*decode_lattice(tiny, kind)), dequantize(tiny, kind)) < LATTICE_ERRORS.get(kind, 2**-10)
