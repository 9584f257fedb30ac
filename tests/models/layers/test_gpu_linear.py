"""Several products of the same states as one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from ingot.cache.forward_batch import ForwardPart
from ingot.engine.memory_budget import MemoryBudget
from ingot.kernels.dense_matmul.kernels import MOST_ROWS, CheckedDense
from ingot.kernels.device import Device
from ingot.kernels.packed_matmul import kernels as packed_kernels
from ingot.kernels.paged_attention.kernels import has_paged_kernels
from ingot.models.adapter import ModelAdapter, adapt_model
from ingot.models.layers import swapping
from ingot.models.layers.gpu_linear import (
    DenseKernelEmbedding,
    DenseKernelLinear,
    QuantizedKernelEmbedding,
    QuantizedKernelLinear,
    QuantizedKernelSwitchLinear,
    join_linears,
    joined_linears_of,
    swap_dense_layers,
)
from ingot.models.layers.modules import named_parameters
from ingot.models.probe import logits_gap
from tests import engines, tiny


def layers(kind: str) -> list[Any]:
    made: list[Any] = [nn.Linear(64, size, bias=kind.startswith("bias")) for size in (96, 32, 32)]
    if "packed" in kind:
        mode, bits = ("mxfp4", 4) if "mxfp4" in kind else ("affine", 4)
        made = [nn.QuantizedLinear.from_linear(layer, 32, bits, mode=mode) for layer in made]
    mx.eval([layer.parameters() for layer in made])
    return made


def shared(one: mx.array, other: mx.array) -> bool:
    return np.shares_memory(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("kind", ["plain", "bias", "packed", "bias packed", "packed mxfp4"])
def test_joined_layers_give_what_each_gives_and_are_in_memory_once(kind: str) -> None:
    made, x = layers(kind), mx.random.normal((5, 64))
    apart, parts = [np.array(layer(x)) for layer in made], [sorted(layer) for layer in made]
    joined = join_linears(*made)
    assert joined is not None
    arrays = [name for name in made[0] if isinstance(made[0][name], mx.array)]
    assert all(shared(layer[name], joined.linear[name]) for layer in made for name in arrays), "views, not copies"
    assert np.allclose(np.array(joined(x)), np.concatenate(apart, axis=-1), atol=1e-5)
    for layer, wanted, names in zip(made, apart, parts, strict=True):
        assert np.allclose(np.array(layer(x)), wanted, atol=1e-5) and sorted(layer) == names


@pytest.mark.parametrize("kind", ["plain", "bias packed"])
def test_a_layer_alone_shares_its_weights(kind: str) -> None:
    [layer, *_], x = layers(kind), mx.random.normal((5, 64))
    product = join_linears(layer)
    assert product is not None and product.linear is layer
    assert product._transposed is None or shared(product._transposed, layer.weight)
    assert np.allclose(np.array(product(x)), np.array(layer(x)), atol=1e-5)


def test_what_is_not_alike_is_not_joined() -> None:
    packed, eight, biased, plain = layers("packed"), layers("packed"), layers("bias"), layers("plain")
    eight[1] = nn.QuantizedLinear.from_linear(plain[1], 32, 8)
    half = layers("plain")
    half[2].weight = half[2].weight.astype(mx.float16)
    for unlike in (eight, [packed[0], *plain[1:]], [biased[0], *plain[1:]], half, [nn.RMSNorm(64)] * 3):
        assert join_linears(*unlike) is None


def test_a_layer_of_another_class_is_left_alone() -> None:
    class Adapted(nn.Linear):
        def __call__(self, x: mx.array) -> mx.array:
            return 2 * super().__call__(x)

    assert join_linears(Adapted(8, 8), Adapted(8, 8)) is None


only_gpu_linear = pytest.mark.skipif(
    not has_paged_kernels(engines.GPU), reason="kernels run on no device here, nor can be emulated"
)


def built(name: str, dtype: mx.Dtype = mx.bfloat16) -> nn.Module:
    model = tiny.build(name)
    model.set_dtype(dtype)
    return model


def logits(adapter: ModelAdapter, steps: list[list[int]]) -> list[mx.array]:
    """Of two rows, given so many tokens of each at each step."""
    rows = adapter.new_batch_state()
    both, found = (rows.new(), rows.new()), []
    for step in steps:
        parts = [ForwardPart((row,), width) for row, width in zip(both, step, strict=True) if width]
        found.append(adapter.run(rows, mx.arange(sum(step)) % 50, parts))
        mx.eval(found[-1], rows.pending())
    return found


@only_gpu_linear
@pytest.mark.parametrize(("name", "kind"), [("kernel", DenseKernelLinear), ("tied", DenseKernelEmbedding)])
def test_what_they_compute_is_what_mlxs_own_products_give(
    name: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [[80, 0], [1, 5], [1, 1]]
    ours = adapt_model(built(name), tiny.CONFIGS[name], engines.GPU)
    assert any(isinstance(module, kind) for _, module in ours.model.named_modules())
    assert not any("own products" in note for note in ours.notes)
    monkeypatch.setattr(swapping, "swap_dense_layers", lambda model, kernels: 0)
    theirs = adapt_model(built(name), tiny.CONFIGS[name], engines.GPU)
    assert not any(isinstance(module, kind) for _, module in theirs.model.named_modules())
    for mine, wanted in zip(logits(ours, steps), logits(theirs, steps), strict=True):
        assert logits_gap(mine, wanted) < 0.05


@only_gpu_linear
def test_a_rows_logits_are_the_same_bits_whatever_is_beside_it() -> None:
    adapter = adapt_model(built("kernel"), tiny.CONFIGS["kernel"], engines.GPU)
    together, alone = logits(adapter, [[5, 9], [3, 2]]), logits(adapter, [[5, 0], [3, 0]])
    assert mx.array_equal(together[0][:5], alone[0]) and mx.array_equal(together[1][:3], alone[1])


@only_gpu_linear
@pytest.mark.parametrize("name", ["kernel", "kernel-hybrid"])
def test_every_plain_layer_is_swapped_and_those_that_a_product_stands_for_are_not(name: str) -> None:
    model = adapt_model(built(name), tiny.CONFIGS[name], engines.GPU).model
    products = joined_linears_of(model)
    assert products and all(type(product.linear) is DenseKernelLinear for product in products)
    parts = {id(part) for product in products for part in product.parts}
    plain = [module for module in model.modules() if type(module) is nn.Linear]
    assert {id(module) for module in plain} == parts


@only_gpu_linear
def test_many_rows_and_other_formats_are_left_to_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = nn.Sequential(nn.Linear(16, 24))
    model.set_dtype(mx.bfloat16)
    assert swap_dense_layers(model, CheckedDense(engines.GPU)) == 1
    [layer], row_counts = model.layers, []
    product = layer._product
    layer._product = lambda *args, **kwargs: row_counts.append(args[0].shape[0]) or product(*args, **kwargs)
    for shape in ((1, 3, 16), (MOST_ROWS, 16), (MOST_ROWS + 1, 16), (0, 16)):
        x = mx.random.normal(shape).astype(mx.bfloat16)
        assert layer(x).shape == (*shape[:-1], 24)
    assert row_counts == [3, MOST_ROWS]
    assert layer(mx.zeros((2, 16))).dtype == mx.float32 and row_counts == [3, MOST_ROWS]


@only_gpu_linear
@pytest.mark.parametrize("device", [Device("metal", "a Mac", 1), Device("cpu", "a CPU", 1)], ids=str)
def test_other_devices_keep_their_layers(device: Device) -> None:
    model = built("llama")
    assert swap_dense_layers(model, CheckedDense(device)) == 0


@only_gpu_linear
def test_float32_is_left_to_mlx_without_a_word() -> None:
    adapter = adapt_model(tiny.build("kernel"), tiny.CONFIGS["kernel"], engines.GPU)
    assert not any(isinstance(module, DenseKernelLinear) for module in adapter.model.modules())
    assert not any("own products" in note for note in adapter.notes)


@only_gpu_linear
def test_the_output_head_still_computes_selected_positions_alone() -> None:
    adapter = adapt_model(built("kernel"), tiny.CONFIGS["kernel"], engines.GPU)
    assert adapter.selection is not None and adapter.selection.was_used
    assert type(adapter.model.lm_head).__name__ == "SelectiveDenseKernelLinear"


@only_gpu_linear
def test_weights_are_counted_once() -> None:
    model = built("kernel")
    before = sum(array.nbytes for _, array in named_parameters(model))
    assert adapt_model(model, tiny.CONFIGS["kernel"], engines.GPU).weight_bytes == before


only_packed_linear = pytest.mark.skipif(
    not has_paged_kernels(engines.GPU), reason="kernels run on no device here, nor can be emulated"
)


FLOATS: dict[str, dict[str, Any]] = {
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "nvfp4": {"bits": 4, "group_size": 16, "mode": "nvfp4"},
    "mxfp8": {"bits": 8, "group_size": 32, "mode": "mxfp8"},
}


def built_of_packed_linear(name: str, **packing: Any) -> nn.Module:
    model = tiny.build(name)
    nn.quantize(model, **(packing or {"bits": 4, "group_size": 32}), class_predicate=_divides)
    return model


def _divides(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def logits_of_packed_linear(adapter: ModelAdapter) -> list[mx.array]:
    """Of a long prompt, of a piece beside a row that decodes, and of one more token."""
    rows = adapter.new_batch_state()
    one, two = rows.new(), rows.new()
    steps = [[ForwardPart((one,), 80)], [ForwardPart((one,), 1), ForwardPart((two,), 5)], [ForwardPart((one, two), 1)]]
    found = []
    for step in steps:
        count = sum(part.width * len(part.rows) for part in step)
        found.append(adapter.run(rows, mx.arange(count) % 50, step))
        mx.eval(found[-1], rows.pending())
    return found


@only_packed_linear
@pytest.mark.parametrize(
    ("name", "kind", "packing"),
    [
        *(("kernel", QuantizedKernelLinear, {}), ("kernel", QuantizedKernelLinear, FLOATS["mxfp8"])),
        *(("tied", QuantizedKernelEmbedding, {}), ("tied", QuantizedKernelEmbedding, FLOATS["nvfp4"])),
        *(("moe", QuantizedKernelSwitchLinear, {}), ("moe", QuantizedKernelSwitchLinear, FLOATS["mxfp4"])),
    ],
    ids=["kernel", "kernel-mxfp8", "tied", "tied-nvfp4", "moe", "moe-mxfp4"],
)
def test_what_they_compute_is_what_mlxs_own_products_give_of_packed_linear(
    name: str, kind: type, packing: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = adapt_model(built_of_packed_linear(name, **packing), tiny.CONFIGS[name], engines.GPU)
    assert any(isinstance(module, kind) for _, module in ours.model.named_modules())
    assert not any("own products" in note for note in ours.notes)
    monkeypatch.setattr(swapping, "swap_quantized_layers", lambda model, kernels: 0)
    theirs = adapt_model(built_of_packed_linear(name, **packing), tiny.CONFIGS[name], engines.GPU)
    assert not any(isinstance(module, kind) for _, module in theirs.model.named_modules())
    for mine, wanted in zip(logits_of_packed_linear(ours), logits_of_packed_linear(theirs), strict=True):
        assert logits_gap(mine, wanted) < 1e-4


@only_packed_linear
def test_the_output_head_still_computes_selected_positions_alone_of_packed_linear() -> None:
    adapter = adapt_model(built_of_packed_linear("kernel"), tiny.CONFIGS["kernel"], engines.GPU)
    assert adapter.selection is not None and adapter.selection.was_used
    assert type(adapter.model.lm_head).__name__ == "SelectiveQuantizedKernelLinear"


@only_packed_linear
def test_packed_weights_are_counted_once() -> None:
    model = built_of_packed_linear("kernel")
    before = sum(array.nbytes for _, array in named_parameters(model))
    assert adapt_model(model, tiny.CONFIGS["kernel"], engines.GPU).weight_bytes == before


@only_packed_linear
def test_packings_without_a_kernel_are_left_to_mlx_and_the_adapter_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_kernels, "FLOAT_FORMATS", ())
    adapter = adapt_model(built_of_packed_linear("kernel", **FLOATS["mxfp4"]), tiny.CONFIGS["kernel"], engines.GPU)
    assert not any(isinstance(module, QuantizedKernelLinear) for _, module in adapter.model.named_modules())
    assert any(
        "packed weights by MLX's own products, slower: weights packed as mxfp4" in note for note in adapter.notes
    )


@only_packed_linear
def test_many_rows_have_memory_for_one_layer_which_the_budget_counts() -> None:
    adapter = adapt_model(built_of_packed_linear("kernel"), tiny.CONFIGS["kernel"], engines.GPU)
    assert adapter.kernels is not None and adapter.kernels.packed.scratch is not None
    # For queries, keys and values, the largest product that there are several of: the output head's is larger.
    assert adapter.footprint.scratch == adapter.kernels.packed.scratch.nbytes == 128 * 32 * 4
    budgets = [
        MemoryBudget(1 << 20, 0, shape, context=64, widest=64, rows=1)
        for shape in (adapter.footprint, replace(adapter.footprint, scratch=0))
    ]
    used = [budget.states + budget.transient for budget in budgets]
    assert used[1] - used[0] == adapter.footprint.scratch
