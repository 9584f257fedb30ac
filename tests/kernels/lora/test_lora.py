"""What adapters add, against plain operations."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.lora import LoraMatrices, add_lora_products
from tests.kernels.paged_attention.memory import BOUNDS, emulated

pytestmark = emulated


def drawn(*shape: int, dtype: mx.Dtype, seed: int = 0) -> mx.array:
    return (mx.random.normal(shape, key=mx.random.key(seed)) / shape[-1] ** 0.5).astype(dtype)


def made(inputs: int, outputs: tuple[int, ...], rank: int, dtype: mx.Dtype) -> LoraMatrices:
    ends = tuple(sum(outputs[: n + 1]) for n in range(len(outputs)))
    into = drawn(3, len(outputs) * rank, inputs, dtype=dtype, seed=1)
    out = drawn(3, ends[-1], rank, dtype=dtype, seed=2)
    return LoraMatrices(into, out, ends)


def wanted(states: mx.array, product: mx.array, matrices: LoraMatrices, places: list[int]) -> mx.array:
    rows = []
    rank, begins = matrices.out.shape[2], (0, *matrices.ends[:-1])
    for x, y, place in zip(states, product, places, strict=True):
        parts = []
        for number, (begin, end) in enumerate(zip(begins, matrices.ends, strict=True)):
            inner = x @ matrices.into[place, number * rank : (number + 1) * rank].T
            parts.append(inner @ matrices.out[place, begin:end].T)
        rows.append(y + mx.concatenate(parts) if place > 0 else y)
    return mx.stack(rows)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("outputs", [(40,), (40, 72), (200, 16, 16), (64, 40, 4, 4)])
def test_each_token_gets_what_its_own_adapter_adds(outputs: tuple[int, ...], dtype: mx.Dtype) -> None:
    matrices, places = made(96, outputs, 16, dtype), [2, 0, 1, 2, -1]
    states, product = drawn(5, 96, dtype=dtype), drawn(5, sum(outputs), dtype=dtype, seed=3)
    found = add_lora_products(Emulator(seed=4), states, product, matrices, mx.array(places, mx.int32))
    right = wanted(states, product, matrices, places).astype(mx.float32)
    assert float(mx.abs(found.astype(mx.float32) - right).max() / mx.abs(right).max()) < BOUNDS[dtype]
    assert mx.array_equal(found[1], product[1]) and mx.array_equal(found[4], product[4])


def test_a_token_has_the_same_bits_alone_and_among_others() -> None:
    matrices = made(2080, (40, 40), 8, mx.bfloat16)
    states, product = drawn(4, 2080, dtype=mx.bfloat16), drawn(4, 80, dtype=mx.bfloat16, seed=3)
    places = mx.array([1, 2, 0, 1], mx.int32)
    together = add_lora_products(Emulator(), states, product, matrices, places)
    for n in range(4):
        alone = add_lora_products(Emulator(), states[n : n + 1], product[n : n + 1], matrices, places[n : n + 1])
        assert mx.array_equal(alone[0], together[n])


def test_matrices_that_are_not_covered_are_known() -> None:
    assert made(96, (40,), 16, mx.bfloat16).is_covered
    assert not made(92, (40,), 16, mx.bfloat16).is_covered
    assert not made(96, (8, 8, 8, 8, 8), 16, mx.bfloat16).is_covered


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("outputs", [(40, 40), (80,)])
def test_what_is_gated_is_gated_behind_it(outputs: tuple[int, ...], dtype: mx.Dtype) -> None:
    matrices, places = made(96, outputs, 16, dtype), mx.array([2, 0, 1], mx.int32)
    states, product = drawn(3, 96, dtype=dtype), 3 * drawn(3, 80, dtype=dtype, seed=3)
    plain = add_lora_products(Emulator(), states, product, matrices, places)
    found = add_lora_products(Emulator(), states, product, matrices, places, gated=True)
    right = (nn.silu(plain[:, :40]) * plain[:, 40:]).astype(mx.float32)
    assert float(mx.abs(found.astype(mx.float32) - right).max() / mx.abs(right).max()) < BOUNDS[dtype]
