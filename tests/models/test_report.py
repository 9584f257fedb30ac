"""What is said of a loaded model."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from ingot.cache.forward_batch import ForwardPart
from ingot.kernels.cpu import native
from ingot.kernels.device import current_device
from ingot.models.adapter import ModelAdapter, adapt_model
from ingot.models.precision import settle_precision
from ingot.models.report import parts_without_fixed_order
from tests import tiny
from tests.one_path import one_path

__all__ = ["one_path"]

pytestmark = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")
TOKENS = [7 * each % 90 + 1 for each in range(150)]


def settled(kind: str) -> ModelAdapter:
    """As it is loaded from files."""
    model = tiny.build(kind)
    settle_precision(model, current_device(), None)
    return adapt_model(model, tiny.CONFIGS[kind], current_device())


def last_logits(model: ModelAdapter, widths: tuple[int, ...], beside: int = 0) -> Any:
    """Of a prompt in chunks of these widths, each beside so many decoding rows."""
    rows = model.new_batch_state()
    row, others = rows.new(), tuple(rows.new() for _ in range(beside))
    begin = 0
    for width in widths:
        tokens = [*TOKENS[begin : begin + width], *range(3, 3 + beside)]
        parts = [ForwardPart((row,), width), *([ForwardPart(others, 1)] if others else [])]
        logits = model.run(rows, mx.array(tokens, mx.uint32), parts, [width - 1])
        mx.eval(logits, rows.pending())
        begin += width
    return np.array(logits[0])


@pytest.mark.parametrize("kind", ["llama", "tied", "moe", "window", "hybrid", "kernel-packed", "kernel-conv-packed"])
def test_models_that_native_kernels_compute_whole_give_the_same_bits_however_they_are_computed(kind: str) -> None:
    model = settled(kind)
    assert parts_without_fixed_order(model.model) == []
    alone = last_logits(model, (150,))
    for widths, beside in (((149, 1), 0), ((64, 64, 22), 3), ((7, 33, 110), 7)):
        assert np.array_equal(alone, last_logits(model, widths, beside))


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("mixed", ["Conv1d", "ConvKVGatedMixer"]),
        ("indexed", ["DeepseekV32Attention", "MultiLinear"]),
        ("kernel-kda-packed", ["MultiLinear"]),
    ],
)
def test_parts_that_mlx_computes_have_no_fixed_order(kind: str, parts: list[str]) -> None:
    assert parts_without_fixed_order(settled(kind).model) == parts


def test_weights_that_stay_in_mlx_s_products_have_no_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts_without_fixed_order(tiny.adapter("hybrid").model) == ["Embedding", "Linear"]
    halves = tiny.build("llama")
    halves.set_dtype(mx.bfloat16)
    assert parts_without_fixed_order(halves) == ["Model"]
    monkeypatch.setenv("INGOT_KERNELS", "mlx")
    assert "Attention" in parts_without_fixed_order(settled("llama").model)
