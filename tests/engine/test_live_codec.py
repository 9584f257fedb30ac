"""What a live codec is refused for, what is said, and what it saves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.tail import STEP
from ingot.engine.budget import Budget
from ingot.engine.live_codec import with_live_codec
from ingot.errors import ConfigError
from ingot.kernels import native
from tests import tiny

CODEC = PairCodec(CodecName.parse("k8v4"))


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
