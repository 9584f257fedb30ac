"""What a live codec is refused for, what is said, and what it saves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from bench import random_models
from ingot.cache import tail, unpacking
from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.coded_slabs import KernelCodedSlabs
from ingot.cache.tail import STEP
from ingot.engine.budget import Budget
from ingot.engine.live_codec import with_live_codec
from ingot.errors import ConfigError
from ingot.kernels import native
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.texts import KernelText
from ingot.kernels.paged import kernels
from ingot.models.adapter import Adapter, adapt
from tests import engines, launches, tiny

CODEC = PairCodec(CodecName.parse("k8v4"))
READ: dict[str, Any] = {**tiny.CONFIGS["kernel"], "model_type": "llama", "head_dim": 64}
"""Heads that a GPU's kernels read in fewer bits."""
CONTEXT, WIDTH = 1024, 17
"""Tokens that lie in fewer bits, and of a prompt behind them: more than kernels read those for."""
emulated = pytest.mark.skipif(not kernels.available(engines.GPU), reason="kernels run nowhere here")


def live_on_a_gpu() -> Adapter:
    model = random_models.build(READ, spread=0.2, dtype=mx.bfloat16)
    return with_live_codec(adapt(model, READ, engines.GPU), CODEC)


@pytest.mark.skipif(not native.available(), reason="without native kernels pages are unpacked")
def test_heads_that_the_native_kernels_cannot_read_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"kv_codec k8v4 cannot be used: .* heads of 8"):
        with_live_codec(tiny.adapter("llama"), CODEC)


def test_keys_of_one_bit_are_refused_with_what_they_would_cost() -> None:
    with pytest.raises(ConfigError, match="kv_codec turbo1/turbo4 cannot be used: with one bit"):
        with_live_codec(tiny.adapter("kernel-32"), PairCodec(CodecName.parse("turbo1/turbo4")))


def test_layers_that_see_a_window_stay_raw_and_that_is_said() -> None:
    adapter = with_live_codec(tiny.adapter("kernel-window"), CODEC)
    assert any("window" in note for note in adapter.notes)
    [coded] = {group.coded is not None for group in adapter.new_rows().groups if group.window is None}
    assert coded and all(group.coded is None for group in adapter.new_rows().groups if group.window is not None)


def test_what_states_are_kept_in_is_told() -> None:
    formats = with_live_codec(tiny.adapter("kernel-32"), CODEC).formats
    assert "states k8v4 behind the newest in float" in str(formats)


def test_more_context_fits_in_the_same_memory_but_not_for_exact_requests() -> None:
    raw = tiny.adapter("kernel-32")
    live = with_live_codec(raw, CODEC)
    footprints = (replace(adapter.footprint, activation=0, logits=0, score=0) for adapter in (raw, live))
    budgets = [Budget(1 << 22, 0, each, context=1 << 20, widest=256, rows=1) for each in footprints]
    plain, coded = (budget.longest(1 << 20) for budget in budgets)
    assert coded > 1.5 * plain > STEP
    assert budgets[1].longest(1 << 20, exact=True) == plain


@emulated
@pytest.mark.parametrize(("new", "said"), [("* 2.0f", "differs by"), ("summ", "does not run")])
def test_where_a_kernel_over_coded_pages_is_wrong_they_are_unpacked_and_that_is_said(
    new: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Emulator):
        def rewritten(self, text: KernelText) -> KernelText:
            body = text.body.replace("+ besides_it;", f"{new} + besides_it;")
            return text._replace(body=body) if "_attend_coded_" in text.name else text

    monkeypatch.setattr(tail, "STEP", 128)
    monkeypatch.setattr(tail, "TAIL", 64)
    right = live_on_a_gpu()
    monkeypatch.setattr(kernels, "launcher", lambda device: Broken())
    wrong = live_on_a_gpu()
    assert not any("kv_codec" in note for note in right.notes)
    [note] = [note for note in wrong.notes if "kv_codec" in note]
    assert note.startswith("kv_codec is unpacked for every step, slower: a kernel") and said in note
    found = []
    for adapter, reads in ((right, True), (wrong, False)):
        rows = adapter.new_rows()
        row = rows.new()
        launches.computed(adapter, rows, row, [5] * 192)
        found.append(launches.decoded(adapter, rows, [row], [7]))
        assert row.tables[0].coded == 2
        assert [isinstance(each.coded, KernelCodedSlabs) for each in rows.groups[0].storages] == [reads] * 2
    assert float(mx.abs(found[0] - found[1]).max()) < 2**-5 * float(mx.abs(found[0]).max())


@emulated
def test_what_prompts_over_coded_pages_take_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "STEP", 128)
    monkeypatch.setattr(tail, "TAIL", 64)
    monkeypatch.setattr(unpacking, "AT_ONCE", 2)
    monkeypatch.setattr(native, "has_codecs", lambda: False)  # as on a GPU
    adapter = live_on_a_gpu()
    rows = adapter.new_rows()
    row = rows.new()
    while row.length < CONTEXT:
        launches.computed_last(adapter, rows, row, [5] * (tail.launch_end(row.length) - row.length))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    launches.computed_last(adapter, rows, row, [5] * WIDTH)
    found = mx.get_peak_memory() - before
    footprint = replace(adapter.footprint, score=4 * 3 * READ["num_attention_heads"])  # it is not fused here
    without = replace(footprint, scratch=0, unpacked=0)
    predicted, short = (
        Budget(1 << 30, 0, each, context=CONTEXT, widest=WIDTH, rows=1).pass_bytes([(WIDTH, row.length)]) + each.scratch
        for each in (footprint, without)
    )
    assert short < found <= predicted, "more than attention alone takes, and no more than is said"
