"""Pages in fewer bits are unpacked some at a time."""

from __future__ import annotations

import mlx.core as mx
import pytest

from ingot.cache import coded_pages, footprint
from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.coded_pages import CodedPageLayout
from ingot.cache.kv_storage import SlabStorage
from ingot.cache.page_groups import PageGroup
from ingot.cache.pages import PAGE, PageTable
from ingot.kernels.cpu import native
from tests.memory import freed_at_once, settled

PAGES, CODED, FEW = 64, 61, 4
HEADS, SIZE = 2, 64


@pytest.mark.sampled(3)
@pytest.mark.parametrize("codec", ["k8v4", "affine8", "turbo3"])
def test_some_at_a_time_are_the_same_numbers_in_less_memory(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)  # as on a GPU
    group = PageGroup(0, None, codec=PairCodec(CodecName.parse(codec)))
    table = PageTable(group.pages)
    table.grow(0, PAGES * PAGE)
    group.provide()
    storage = SlabStorage(group, HEADS, (SIZE, SIZE), mx.bfloat16)
    keys, values = (mx.random.normal((PAGES * PAGE, HEADS, SIZE)).astype(mx.bfloat16) for _ in range(2))
    storage.write(
        keys, values, [(place * PAGE, PAGE, group.slot_of(table.numbers[place]), 0) for place in range(PAGES)]
    )
    mx.eval(storage.pending())
    fresh = table.encode(CODED)
    assert group.coded is not None and storage.coded is not None
    group.coded.provide()
    group.encode(fresh)
    assert len(group.coded.slabs) == 1, "which would be read at once"

    form = storage.coded.form

    def unpacked(at_once: int) -> tuple[mx.array, mx.array]:
        monkeypatch.setattr(coded_pages, "UNPACK_PAGES", at_once)
        before = settled()
        found = storage.gathered(group.index(table.numbers, table.coded))
        mx.eval(found)
        used = mx.get_peak_memory() - before
        assert used <= 2 * PAGES * PAGE * coded_pages.unpacked_token_bytes(form) + coded_pages.unpack_scratch_bytes(
            form
        )
        return found

    few, whole = unpacked(FEW), unpacked(PAGES)
    assert all(mx.array_equal(one, other).item() for one, other in zip(few, whole, strict=True))


def test_no_more_pages_are_unpacked_at_once_than_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_pages, "UNPACK_PAGES", FEW)
    numbers = list(range(PAGES + 1))
    parts = [numbers[part] for part in coded_pages.page_slices(len(numbers))]
    assert max(map(len, parts)) == FEW and [one for part in parts for one in part] == numbers


@pytest.mark.sampled(4)
@freed_at_once
@pytest.mark.parametrize("codec", ["k8v4", "affine8", "turbo4", "turbo2"])
def test_what_encoding_takes_is_predicted(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)  # as on a GPU
    form = CodedPageLayout(PairCodec(CodecName.parse(codec)), HEADS, (SIZE, SIZE), mx.bfloat16)
    pages = (footprint.ENCODE_STEP_TOKENS // PAGE, HEADS, PAGE, SIZE)
    keys, values = (mx.random.normal(pages).astype(mx.bfloat16) for _ in range(2))
    mx.eval(keys, values, form.encode(keys, values))
    before = settled()
    mx.eval(form.encode(keys, values))
    assert mx.get_peak_memory() - before <= coded_pages.encode_scratch_bytes(form)
