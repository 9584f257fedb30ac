"""Records that leave their pages and come back. With a codec that loses nothing, so that nothing may be lost."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.cache.batch_state import BatchState
from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import RecordCodec
from ingot.cache.pages import PAGE
from ingot.cache.record_encoding import LossyEncoding
from ingot.cache.records import Record, restore_row, take_record
from ingot.errors import ConfigError
from ingot.models.kv_codec import record_form_of
from tests import tiny
from tests.cache.test_batch_state import LAYER_KINDS, WIDEST, close, exact, feed, new_batch_state, spoil


def encoding_of(rows: BatchState, kind: str, codec: str = "raw") -> LossyEncoding:
    form = record_form_of(tiny.adapter(kind, WIDEST, exact=True), rows)
    return LossyEncoding(rows, RecordCodec(CodecName.parse(codec)), form)


def prompt(count: int, seed: int = 4) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(95) for _ in range(count)]


def records_of(rows: BatchState, kind: str, tokens: list[int], cuts: list[int]) -> list[Record]:
    row = rows.new()
    made = []
    for begin, end in zip((0, *cuts), cuts, strict=False):
        feed(rows, kind, row, tokens[begin:end])
        made.append(take_record(rows, row, begin))
    rows.leave(row)
    return made


def goes_on(rows: BatchState, kind: str, records: list[Record], tokens: list[int]) -> bool:
    row = rows.new()
    restore_row(rows, row, records, len(tokens))
    right = close(feed(rows, kind, row, [3]), exact(kind, [*tokens, 3]))
    rows.leave(row)
    return right


@pytest.mark.parametrize("kind", [*LAYER_KINDS, pytest.param("moe", marks=pytest.mark.slow)])
@settings(max_examples=10)
@given(
    cuts=st.lists(st.integers(1, 250), min_size=1, max_size=4, unique=True).map(sorted),
    chosen=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_records_without_pages_are_gone_on_from_as_if_they_had_them(
    kind: str, cuts: list[int], chosen: list[bool]
) -> None:
    rows = new_batch_state(kind)
    encoding = encoding_of(rows, kind)
    tokens = prompt(cuts[-1])
    records = records_of(rows, kind, tokens, cuts)
    for number, small in enumerate(chosen[: len(records)]):
        if small:
            records[number] = encoding.shrunk(records[number])
    spoil(rows)
    assert goes_on(rows, kind, encoding.with_pages(records, cuts[-1]), tokens)
    rows.check()


@pytest.mark.parametrize("first", [40, 100])
def test_a_page_that_others_count_on_is_still_paid_for_once_its_record_has_pages_again(first: int) -> None:
    rows = new_batch_state("llama")
    [group] = rows.groups
    encoding, tokens = encoding_of(rows, "llama"), prompt(200)
    records = records_of(rows, "llama", tokens, [first, 200])  # the second goes on from inside of the first's last page
    records[0] = encoding.shrunk(records[0])
    records = encoding.with_pages(records, 200)
    assert sum(record.parts[0].nbytes for record in records) == group.pages.kept * group.page_bytes
    assert goes_on(rows, "llama", records, tokens)
    rows.check()


@pytest.mark.parametrize("kind", ["llama", "window"])
@pytest.mark.parametrize("at", [1, 37, PAGE, 90])
def test_a_record_without_pages_is_split_like_any_other(kind: str, at: int) -> None:
    rows = new_batch_state(kind)
    encoding = encoding_of(rows, kind)
    tokens = prompt(100)
    [whole] = records_of(rows, kind, tokens, [100])
    first, second = encoding.shrunk(whole).split(at)
    assert (first.begin, first.end, second.begin, second.end) == (0, at, at, 100)
    del whole
    spoil(rows)
    assert goes_on(rows, kind, encoding.with_pages([first, second], 100), tokens)


def test_a_sequence_may_part_in_the_middle_of_what_is_encoded() -> None:
    rows = new_batch_state("llama")
    encoding = encoding_of(rows, "llama")
    tokens = prompt(200)
    [whole] = records_of(rows, "llama", tokens, [200])
    small = encoding.shrunk(whole)
    del whole
    made = encoding.with_pages([small], 77)
    assert made[0].end == 77 and rows.groups[0].pages.kept == 2, "no more is decoded than is needed"
    assert goes_on(rows, "llama", made, tokens[:77])


@pytest.mark.parametrize("codec", ["affine8", "turbo3", "k8v4", "raw/turbo2"])
@pytest.mark.parametrize("kind", ["llama", "hybrid", "window"])
def test_what_it_frees_is_known_before(kind: str, codec: str) -> None:
    rows = new_batch_state(kind)
    encoding = encoding_of(rows, kind, codec)
    [record] = records_of(rows, kind, prompt(200), [200])
    before, expected = record.nbytes, encoding.saves(record)
    record = encoding.shrunk(record)
    assert before - record.nbytes == expected
    assert all(group.pages.kept == 0 for group in rows.groups)
    assert record.codec == codec and encoding.saves(record) == 0


def test_pages_are_paid_for_while_somebody_holds_them() -> None:
    rows = new_batch_state("llama")
    [group] = rows.groups
    encoding = encoding_of(rows, "llama")
    first, second = records_of(rows, "llama", prompt(150), [100, 150])  # they share the page that token 100 lies in
    small = encoding.shrunk(first)
    del first
    assert small.nbytes + second.nbytes - small.encoded_bytes == group.pages.kept * group.page_bytes
    second = encoding.shrunk(second)
    assert encoding.saves(small) == group.page_bytes, "nobody else holds it any more"
    small = encoding.shrunk(small)
    assert group.pages.kept == 0 and small.nbytes == small.encoded_bytes


def test_records_that_share_a_page_let_go_of_it_one_after_the_other() -> None:
    rows = new_batch_state("llama")
    [group] = rows.groups
    encoding = encoding_of(rows, "llama", "turbo4")
    first, second = records_of(rows, "llama", prompt(106), [100, 106])
    assert second.nbytes == 0, "the first pays for the page"
    assert encoding.saves(second) > 0
    second = encoding.shrunk(second)
    first = encoding.shrunk(first)
    assert group.pages.kept == 0 and first.has_pages is second.has_pages is False


def test_what_running_rows_hold_is_not_worth_encoding() -> None:
    rows = new_batch_state("llama")
    encoding = encoding_of(rows, "llama", "turbo1")
    row = rows.new()
    feed(rows, "llama", row, prompt(200))
    record = take_record(rows, row, 0)
    assert encoding.saves(record) < 0
    rows.leave(row)
    assert encoding.saves(record) > 0


def test_what_came_back_is_not_encoded_again() -> None:
    rows = new_batch_state("llama")
    encoding = encoding_of(rows, "llama", "turbo2")
    [record] = records_of(rows, "llama", prompt(100), [100])
    small = encoding.shrunk(record)
    [both] = encoding.with_pages([small], 100)
    assert both.has_pages and both.encoded is small.encoded
    assert encoding.saves(both) == both.nbytes - small.nbytes
    assert encoding.shrunk(both).encoded is small.encoded


@pytest.mark.parametrize(("codec", "most"), [("affine8", 0.05), ("turbo4", 0.6)])
def test_less_is_lost_with_more_bits(codec: str, most: float) -> None:
    rows = new_batch_state("llama")
    encoding = encoding_of(rows, "llama", codec)
    tokens = prompt(150)
    [record] = records_of(rows, "llama", tokens, [150])
    record = encoding.shrunk(record)
    row = rows.new()
    restore_row(rows, row, encoding.with_pages([record], 150), 150)
    want = exact("llama", [*tokens, 3])
    off = mx.abs(feed(rows, "llama", row, [3]) - want).max() / mx.std(want)
    assert 0 < off.item() < most


def test_states_that_cannot_be_encoded_are_refused_by_name() -> None:
    rows = new_batch_state("llama")
    form = record_form_of(tiny.adapter("llama", WIDEST, exact=True), rows)
    for delta in form.sample.deltas:
        assert delta is not None
        object.__setattr__(delta, "arrays", tuple(mx.zeros((1, 2, 32, 60)) for _ in delta.arrays))
    with pytest.raises(ConfigError, match=r"turbo3 cannot be used: turbo3 cannot encode this model's keys.*not 60"):
        LossyEncoding(rows, RecordCodec(CodecName.parse("turbo3")), form)
    form = record_form_of(tiny.adapter("llama", WIDEST, exact=True), rows)
    object.__setattr__(form.sample, "deltas", (None, None))
    with pytest.raises(ConfigError, match="has no keys and values"):
        LossyEncoding(rows, RecordCodec(CodecName.parse("turbo3")), form)


def test_a_row_that_goes_on_from_what_came_back_keeps_its_pages_when_the_record_lets_go() -> None:
    rows = new_batch_state("llama")
    encoding = encoding_of(rows, "llama")
    tokens = prompt(100)
    [record] = records_of(rows, "llama", tokens, [100])
    [both] = encoding.with_pages([encoding.shrunk(record)], 100)
    del record
    row = rows.new()
    restore_row(rows, row, [both], 100)
    assert encoding.saves(both) > 0, "it need not pay for what the row holds"
    small = encoding.shrunk(both)
    assert both.nbytes - small.nbytes == encoding.saves(both)
    del both
    spoil(rows)
    assert close(feed(rows, "llama", row, [3]), exact("llama", [*tokens, 3]))
    assert goes_on(rows, "llama", encoding.with_pages([small], 100), tokens)
    rows.check()
