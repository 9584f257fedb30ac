import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from ingot.models.gguf.lattices import ADDED, EXACT, GROUP, LATTICE_BITS, on_lattice
from tests.models.gguf.making import random_rows


def blocks_of(kind: Kind, size: float = 1.0) -> np.ndarray:
    block, width = GGML_QUANT_SIZES[kind]
    return random_rows(np.random.default_rng(7), kind, 512, 2 * block, size).reshape(-1, width)


def values_of(codes: np.ndarray, scales: np.ndarray, biases: np.ndarray) -> np.ndarray:
    grouped = codes.reshape(*scales.shape, GROUP).astype(np.float32)
    return (grouped * scales[..., None] + biases[..., None]).reshape(codes.shape)


def moved(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


def test_every_format_states_whether_it_is_exact_or_what_it_adds() -> None:
    assert EXACT | ADDED.keys() == LATTICE_BITS.keys()
    assert not EXACT & ADDED.keys()


@pytest.mark.parametrize("kind", sorted(EXACT), ids=lambda kind: kind.name)
def test_even_tables_keep_their_values_but_for_the_rounding_of_the_step(kind: Kind) -> None:
    blocks = blocks_of(kind)
    found, expected = values_of(*on_lattice(blocks, kind)), dequantize(blocks, kind)
    np.testing.assert_allclose(found, expected, atol=np.abs(expected).max() * 2**-9)
    assert moved(found, expected) < 2**-10


@pytest.mark.parametrize("kind", sorted(ADDED), ids=lambda kind: kind.name)
def test_other_tables_move_their_values_by_no_more_than_is_stated(kind: Kind) -> None:
    blocks = blocks_of(kind)
    assert moved(values_of(*on_lattice(blocks, kind)), dequantize(blocks, kind)) < ADDED[kind]


@pytest.mark.parametrize("kind", LATTICE_BITS, ids=lambda kind: kind.name)
def test_codes_fit_their_bits_and_steps_are_float16_where_that_is_fine(kind: Kind) -> None:
    codes, scales, biases = on_lattice(blocks_of(kind), kind)
    assert codes.max() < 2 ** LATTICE_BITS[kind]
    for numbers in (scales, biases):
        halves = numbers.astype(np.float16).astype(np.float32)
        assert np.array_equal(np.where(np.abs(numbers) < 2**-14, numbers, halves), numbers)


@pytest.mark.parametrize("kind", LATTICE_BITS, ids=lambda kind: kind.name)
def test_blocks_of_zeros_stay_zeros_and_tiny_ones_keep_their_size(kind: Kind) -> None:
    nothing = np.zeros((3, GGML_QUANT_SIZES[kind][1]), np.uint8)
    assert not values_of(*on_lattice(nothing, kind)).any()
    tiny = blocks_of(kind, 1e-2)
    assert moved(values_of(*on_lattice(tiny, kind)), dequantize(tiny, kind)) < ADDED.get(kind, 2**-10)
