"""Packed layers by a GPU's kernels, against MLX's own products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from ingot.cache.forward_batch import Part
from ingot.engine.memory_budget import Budget
from ingot.kernels.paged_attention.kernels import available
from ingot.models.adapter import Adapter, adapt
from ingot.models.layers import swapping
from ingot.models.layers.gpu_linear import KernelEmbedding, KernelLinear, KernelSwitchLinear
from ingot.models.layers.modules import parameters
from ingot.models.probe import apart
from tests import engines, tiny

pytestmark = pytest.mark.skipif(not available(engines.GPU), reason="kernels run on no device here, nor can be emulated")


def built(name: str, **packing: Any) -> nn.Module:
    model = tiny.build(name)
    nn.quantize(model, **(packing or {"bits": 4, "group_size": 32}), class_predicate=_divides)
    return model


def _divides(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def logits(adapter: Adapter) -> list[mx.array]:
    """Of a long prompt, of a piece beside a row that decodes, and of one more token."""
    rows = adapter.new_rows()
    one, two = rows.new(), rows.new()
    steps = [[Part((one,), 80)], [Part((one,), 1), Part((two,), 5)], [Part((one, two), 1)]]
    found = []
    for step in steps:
        count = sum(part.width * len(part.rows) for part in step)
        found.append(adapter.run(rows, mx.arange(count) % 50, step))
        mx.eval(found[-1], rows.pending())
    return found


@pytest.mark.parametrize(
    ("name", "kind"), [("kernel", KernelLinear), ("tied", KernelEmbedding), ("moe", KernelSwitchLinear)]
)
def test_what_they_compute_is_what_mlxs_own_products_give(
    name: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = adapt(built(name), tiny.CONFIGS[name], engines.GPU)
    assert any(isinstance(module, kind) for _, module in ours.model.named_modules())
    assert not any("own products" in note for note in ours.notes)
    monkeypatch.setattr(swapping, "swap_packed", lambda model, kernels: 0)
    theirs = adapt(built(name), tiny.CONFIGS[name], engines.GPU)
    assert not any(isinstance(module, kind) for _, module in theirs.model.named_modules())
    for mine, wanted in zip(logits(ours), logits(theirs), strict=True):
        assert apart(mine, wanted) < 1e-4


def test_the_output_head_still_computes_selected_positions_alone() -> None:
    adapter = adapt(built("kernel"), tiny.CONFIGS["kernel"], engines.GPU)
    assert adapter.selection is not None and adapter.selection.obeyed
    assert type(adapter.model.lm_head).__name__ == "SelectiveKernelLinear"


def test_weights_are_counted_once() -> None:
    model = built("kernel")
    before = sum(array.nbytes for _, array in parameters(model))
    assert adapt(model, tiny.CONFIGS["kernel"], engines.GPU).weight_bytes == before


def test_packings_of_other_modes_are_left_to_mlx_and_the_adapter_says_so() -> None:
    adapter = adapt(built("kernel", bits=4, group_size=32, mode="mxfp4"), tiny.CONFIGS["kernel"], engines.GPU)
    assert not any(isinstance(module, KernelLinear) for _, module in adapter.model.named_modules())
    assert any(
        "packed weights by MLX's own products, slower: weights packed as mxfp4" in note for note in adapter.notes
    )


def test_many_rows_have_memory_for_one_layer_which_the_budget_counts() -> None:
    adapter = adapt(built("kernel"), tiny.CONFIGS["kernel"], engines.GPU)
    assert adapter.kernels is not None and adapter.kernels.packed.scratch is not None
    # For queries, keys and values, the largest product that there are several of: the output head's is larger.
    assert adapter.footprint.scratch == adapter.kernels.packed.scratch.nbytes == 128 * 32 * 4
    budgets = [
        Budget(1 << 20, 0, shape, context=64, widest=64, rows=1)
        for shape in (adapter.footprint, replace(adapter.footprint, scratch=0))
    ]
    taken = [budget.states + budget.transient for budget in budgets]
    assert taken[1] - taken[0] == adapter.footprint.scratch
