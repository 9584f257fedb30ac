import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from ingot.models.gguf.lattices import LATTICE_BITS
from ingot.models.gguf.quant_types import DENSE_KINDS, GROUP, PACKED_BITS, dense, narrowest, pack
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
    packed = pack(raw, kind)
    codes = unpack_codes(packed.weight, PACKED_BITS[kind]).reshape(ROWS, -1, GROUP).astype(np.float32)
    values = (codes * packed.scales[..., None] + packed.biases[..., None]).reshape(ROWS, COLUMNS)
    np.testing.assert_array_equal(values, dequantize(raw, kind))


@pytest.mark.parametrize("kind", SAME)
def test_mlx_reads_the_packed_form_as_the_same_values(kind: Kind) -> None:
    mx = pytest.importorskip("mlx.core")
    raw = random_rows(np.random.default_rng(2), kind, ROWS, COLUMNS)
    packed = pack(raw, kind)
    read = mx.dequantize(
        mx.array(packed.weight), mx.array(packed.scales), mx.array(packed.biases), GROUP, PACKED_BITS[kind]
    )
    largest = np.abs(packed.scales).max() * 256
    np.testing.assert_allclose(np.array(read), dequantize(raw, kind), rtol=0, atol=largest * 2**-23)


def test_mlx_reads_mxfp4_as_the_same_values() -> None:
    mx = pytest.importorskip("mlx.core")
    raw = random_rows(np.random.default_rng(2), Kind.MXFP4, ROWS, COLUMNS)
    packed = pack(raw, Kind.MXFP4)
    read = mx.dequantize(mx.array(packed.weight), mx.array(packed.scales), None, GROUP, 4, mode="mxfp4")
    np.testing.assert_array_equal(np.array(read.astype(mx.float32)), dequantize(raw, Kind.MXFP4))


@pytest.mark.parametrize("bits", sorted(set(PACKED_BITS.values())))
def test_mlx_packs_codes_as_the_little_endian_stream_that_we_write(bits: int) -> None:
    mx = pytest.importorskip("mlx.core")
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 2**bits, (4, 64))
    codes[:, 0::32], codes[:, 1::32] = 0, 2**bits - 1  # so that each group's scale is one
    weight, scales, biases = mx.quantize(mx.array(codes.astype(np.float32)), GROUP, bits)
    values = unpack_codes(np.array(weight), bits).reshape(4, -1, GROUP)
    read = values * np.array(scales)[..., None] + np.array(biases)[..., None]
    np.testing.assert_allclose(read.reshape(4, 64), codes, atol=1e-3)


@pytest.mark.parametrize("kind", sorted(DENSE_KINDS - {Kind.F16, Kind.F32}))
def test_formats_that_mlx_lacks_become_the_floats_of_the_gguf_package(kind: Kind) -> None:
    raw = random_rows(np.random.default_rng(4), kind, ROWS, COLUMNS)
    np.testing.assert_array_equal(dense(raw, kind), dequantize(raw, kind))


def test_floats_stay_as_they_are() -> None:
    values = np.random.default_rng(5).standard_normal((3, 8))
    for dtype, kind in ((np.float16, Kind.F16), (np.float32, Kind.F32)):
        raw = values.astype(dtype).view(np.uint8)
        np.testing.assert_array_equal(dense(raw, kind), values.astype(dtype))


def test_float16_is_chosen_only_where_it_is_exact() -> None:
    assert narrowest(np.array([0.5, -8.0, 65504.0], np.float32)) is np.float16
    assert narrowest(np.array([1 + 2**-12], np.float32)) is np.float32
    assert narrowest(np.array([70000.0], np.float32)) is np.float32


def test_every_packed_format_has_blocks_of_whole_groups() -> None:
    assert all(GGML_QUANT_SIZES[kind][0] % GROUP == 0 for kind in PACKED_BITS)
