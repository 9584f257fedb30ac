"""Gated delta nets by a GPU's kernels, against the models' own code for them."""

from __future__ import annotations

import mlx.core as mx
import pytest

from ingot.cache.forward_batch import Part
from ingot.kernels.paged_attention.kernels import available
from ingot.models.adapter import Adapter, adapt
from ingot.models.layers import mixers
from ingot.models.layers.gated_delta import KernelDelta
from ingot.models.probe import apart
from tests import engines, tiny
from tests.models.layers import family_configs

pytestmark = pytest.mark.skipif(not available(engines.GPU), reason="kernels run on no device here, nor can be emulated")


def logits(adapter: Adapter) -> mx.array:
    """Of three rows: prompts of unlike lengths in one pass, a piece beside rows that decode, and all decoding."""
    rows = adapter.new_rows()
    one, two, three = (rows.new() for _ in range(3))
    steps = [
        [Part((one,), 40), Part((two,), 3)],
        [Part((two,), 1), Part((one,), 5), Part((three,), 17)],
        [Part((one, two, three), 1)],
        [Part((three, one), 1), Part((two,), 4)],
    ]
    found = []
    for step in steps:
        count = sum(part.width * len(part.rows) for part in step)
        found.append(adapter.run(rows, mx.arange(count) % 50, step))
        mx.eval(found[-1], rows.pending())
    return mx.concatenate(found)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_what_they_compute_is_what_the_models_own_code_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = adapt(family_configs.build(name), family_configs.config(name), engines.GPU)
    assert any(isinstance(module, KernelDelta) for _, module in ours.model.named_modules())
    assert not any("token by token" in note for note in ours.notes)
    monkeypatch.setattr(mixers, "kernel_delta", lambda module, kernels: None)
    theirs = adapt(family_configs.build(name), family_configs.config(name), engines.GPU)
    assert not any(isinstance(module, KernelDelta) for _, module in theirs.model.named_modules())
    assert ours.mixed and theirs.mixed
    assert apart(logits(ours), logits(theirs)) < 1e-4


def test_heads_too_small_for_the_kernels_run_their_own_code_and_the_adapter_says_so() -> None:
    plain = adapt(tiny.build("hybrid"), tiny.CONFIGS["hybrid"], engines.GPU)
    assert not any(isinstance(module, KernelDelta) for _, module in plain.model.named_modules())
    assert any("gated delta token by token, slower: keys of" in note for note in plain.notes)
