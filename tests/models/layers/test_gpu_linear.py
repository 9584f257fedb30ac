"""Plain layers of 16 bits by a GPU's kernels, against MLX's own products."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from ingot.cache.forward_batch import Part
from ingot.kernels.dense.checked import CheckedDense
from ingot.kernels.dense_matmul.kernels import MOST_ROWS
from ingot.kernels.device import Device
from ingot.kernels.paged_attention.kernels import available
from ingot.models.adapter import Adapter, adapt
from ingot.models.layers import swapping
from ingot.models.layers.dense_linear import DenseKernelEmbedding, DenseKernelLinear, swap_dense
from ingot.models.layers.modules import parameters
from ingot.models.layers.products import products_of
from ingot.models.probe import apart
from tests import engines, tiny

pytestmark = pytest.mark.skipif(not available(engines.GPU), reason="kernels run on no device here, nor can be emulated")


def built(name: str, dtype: mx.Dtype = mx.bfloat16) -> nn.Module:
    model = tiny.build(name)
    model.set_dtype(dtype)
    return model


def logits(adapter: Adapter, steps: list[list[int]]) -> list[mx.array]:
    """Of two rows, given so many tokens of each at each step."""
    rows = adapter.new_rows()
    both, found = (rows.new(), rows.new()), []
    for step in steps:
        parts = [Part((row,), width) for row, width in zip(both, step, strict=True) if width]
        found.append(adapter.run(rows, mx.arange(sum(step)) % 50, parts))
        mx.eval(found[-1], rows.pending())
    return found


@pytest.mark.parametrize(("name", "kind"), [("kernel", DenseKernelLinear), ("tied", DenseKernelEmbedding)])
def test_what_they_compute_is_what_mlxs_own_products_give(
    name: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [[80, 0], [1, 5], [1, 1]]
    ours = adapt(built(name), tiny.CONFIGS[name], engines.GPU)
    assert any(isinstance(module, kind) for _, module in ours.model.named_modules())
    assert not any("own products" in note for note in ours.notes)
    monkeypatch.setattr(swapping, "swap_dense", lambda model, kernels: 0)
    theirs = adapt(built(name), tiny.CONFIGS[name], engines.GPU)
    assert not any(isinstance(module, kind) for _, module in theirs.model.named_modules())
    for mine, wanted in zip(logits(ours, steps), logits(theirs, steps), strict=True):
        assert apart(mine, wanted) < 0.05


def test_a_rows_logits_are_the_same_bits_whatever_is_beside_it() -> None:
    adapter = adapt(built("kernel"), tiny.CONFIGS["kernel"], engines.GPU)
    beside, alone = logits(adapter, [[5, 9], [3, 2]]), logits(adapter, [[5, 0], [3, 0]])
    assert mx.array_equal(beside[0][:5], alone[0]) and mx.array_equal(beside[1][:3], alone[1])


@pytest.mark.parametrize("name", ["kernel", "kernel-hybrid"])
def test_every_plain_layer_is_swapped_and_those_that_a_product_stands_for_are_not(name: str) -> None:
    model = adapt(built(name), tiny.CONFIGS[name], engines.GPU).model
    products = products_of(model)
    assert products and all(type(product.linear) is DenseKernelLinear for product in products)
    parts = {id(part) for product in products for part in product.parts}
    plain = [module for module in model.modules() if type(module) is nn.Linear]
    assert {id(module) for module in plain} == parts


def test_many_rows_and_other_formats_are_left_to_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = nn.Sequential(nn.Linear(16, 24))
    model.set_dtype(mx.bfloat16)
    assert swap_dense(model, CheckedDense(engines.GPU)) == 1
    [layer], asked = model.layers, []
    product = layer._product
    layer._product = lambda *given, **named: asked.append(given[0].shape[0]) or product(*given, **named)
    for shape in ((1, 3, 16), (MOST_ROWS, 16), (MOST_ROWS + 1, 16), (0, 16)):
        x = mx.random.normal(shape).astype(mx.bfloat16)
        assert layer(x).shape == (*shape[:-1], 24)
    assert asked == [3, MOST_ROWS]
    assert layer(mx.zeros((2, 16))).dtype == mx.float32 and asked == [3, MOST_ROWS]


@pytest.mark.parametrize("device", [Device("metal", "a Mac", 1), Device("cpu", "a CPU", 1)], ids=str)
def test_other_devices_keep_their_layers(device: Device) -> None:
    model = built("llama")
    assert swap_dense(model, CheckedDense(device)) == 0


def test_float32_is_left_to_mlx_without_a_word() -> None:
    adapter = adapt(tiny.build("kernel"), tiny.CONFIGS["kernel"], engines.GPU)
    assert not any(isinstance(module, DenseKernelLinear) for module in adapter.model.modules())
    assert not any("own products" in note for note in adapter.notes)


def test_the_output_head_still_computes_selected_positions_alone() -> None:
    adapter = adapt(built("kernel"), tiny.CONFIGS["kernel"], engines.GPU)
    assert adapter.selection is not None and adapter.selection.obeyed
    assert type(adapter.model.lm_head).__name__ == "SelectiveDenseKernelLinear"


def test_weights_are_counted_once() -> None:
    model = built("kernel")
    before = sum(array.nbytes for _, array in parameters(model))
    assert adapt(model, tiny.CONFIGS["kernel"], engines.GPU).weight_bytes == before
