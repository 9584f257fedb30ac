import random
from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ingot.cache.pages import PAGE
from ingot.cache.records import Record, place_record, restore_row, take_record, unpage_record
from tests.cache.test_batch_state import LAYER_KINDS, close, exact, feed, new_batch_state, spoil

pytestmark = pytest.mark.usefixtures("rules")


def prompt(count: int, seed: int = 4) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(95) for _ in range(count)]


@pytest.mark.parametrize("kind", [*LAYER_KINDS, pytest.param("moe", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cuts", [(300,), (5, 40, 41, 290, 300), (128, 256)])
def test_a_sequence_goes_on_from_its_records_as_if_it_had_never_stopped(kind: str, cuts: tuple[int, ...]) -> None:
    tokens = prompt(cuts[-1])
    rows = new_batch_state(kind)
    row = rows.new()
    records: list[Record] = []
    for begin, end in zip((0, *cuts), cuts, strict=False):
        feed(rows, kind, row, tokens[begin:end])
        records.append(take_record(rows, row, begin))
    feed(rows, kind, row, [9] * 30)  # what the row does afterwards is nothing to the records
    rows.leave(row)
    spoil(rows)
    other = rows.new()
    restore_row(rows, other, records, cuts[-1])
    assert close(feed(rows, kind, other, [7, 8]), exact(kind, [*tokens, 7, 8]))


@pytest.mark.parametrize("kind", ["llama", "window"])
@pytest.mark.parametrize("at", [37, PAGE, 90])
def test_a_split_record_covers_the_same_tokens(kind: str, at: int) -> None:
    tokens = prompt(100, 1)
    rows = new_batch_state(kind)
    row = rows.new()
    feed(rows, kind, row, tokens)
    whole = take_record(rows, row, 0)
    first, second = whole.split(at)
    assert (first.begin, first.end, second.begin, second.end) == (0, at, at, 100)
    assert first.nbytes + second.nbytes == whole.nbytes
    del whole
    rows.leave(row)
    spoil(rows)
    other = rows.new()
    restore_row(rows, other, [first, second], 100)
    assert close(feed(rows, kind, other, [3]), exact(kind, [*tokens, 3]))


@settings(max_examples=25)
@given(length=st.integers(2, 200), cut=st.floats(0, 1), resumed=st.floats(0, 1))
def test_a_record_holds_what_it_covers_and_lets_go_of_the_rest(length: int, cut: float, resumed: float) -> None:
    rows = new_batch_state("llama")
    row = rows.new()
    feed(rows, "llama", row, prompt(length))
    [group] = rows.groups
    whole = take_record(rows, row, 0)
    rows.leave(row)
    assert whole.nbytes == whole.idle_bytes == group.pages.used * group.page_bytes
    at = max(1, min(length - 1, int(cut * length)))
    upper, lower = whole.split(at)
    del whole
    assert upper.nbytes + lower.nbytes == group.pages.kept * group.page_bytes
    del lower
    assert group.pages.kept == -(-at // PAGE)
    going = rows.new()
    restore_row(rows, going, [upper], max(1, int(resumed * at)))
    assert upper.idle_bytes <= upper.nbytes - group.page_bytes, "a row that went on from it holds some of it too"


def test_records_of_branches_count_what_they_share_once() -> None:
    rows = new_batch_state("llama")
    [group] = rows.groups
    row, other = rows.new(), rows.new()
    feed(rows, "llama", row, prompt(100))
    trunk = take_record(rows, row, 0)
    restore_row(rows, other, [trunk], 100)
    feed(rows, "llama", row, prompt(50, 1))
    feed(rows, "llama", other, prompt(50, 2))
    branches = [take_record(rows, each, 100) for each in (row, other)]
    assert trunk.nbytes + sum(branch.nbytes for branch in branches) == group.pages.kept * group.page_bytes


@pytest.mark.parametrize("kind", ["llama", "window"])
@pytest.mark.parametrize("gap", ["nothing", "beginning", "middle", "end"])
def test_a_row_is_never_longer_than_what_it_holds(kind: str, gap: str) -> None:
    """Whoever had the pages before must not be seen through a hole in the records."""
    rows = new_batch_state(kind)
    row = rows.new()
    feed(rows, kind, row, [5] * 160)
    whole = take_record(rows, row, 0)
    first, second = whole.split(155)  # within the window
    records = [first, second]
    for group in range(len(whole.parts)):
        pieces = [record.parts[group] for record in records]
        holed = {
            "nothing": [replace(piece, end=piece.begin) for piece in pieces],
            "beginning": [replace(pieces[0], begin=pieces[0].begin + 1), pieces[1]],
            "middle": [pieces[0].part(0, 154), pieces[1]],
            "end": [pieces[0], pieces[1].part(155, 159)],
        }[gap]
        forged = [
            replace(record, parts=(*record.parts[:group], hole, *record.parts[group + 1 :]))
            for record, hole in zip(records, holed, strict=True)
        ]
        other = rows.new()
        with pytest.raises(RuntimeError, match=f"group {group} "):
            restore_row(rows, other, forged, 160)
        assert other.length == 0
    restore_row(rows, other := rows.new(), records, 160)
    assert other.length == 160


@pytest.mark.parametrize("kind", [*LAYER_KINDS, pytest.param("moe", marks=pytest.mark.slow)])
@settings(max_examples=settings().max_examples // 5)
@example(cuts=[1, 13])  # the window leaves out a token between them
@example(cuts=[12, 13])  # and the first one
@given(cuts=st.lists(st.integers(1, 250), min_size=1, max_size=4, unique=True).map(sorted))
def test_records_leave_their_pages_and_come_back_to_others(kind: str, cuts: list[int]) -> None:
    tokens = prompt(cuts[-1])
    rows, elsewhere = new_batch_state(kind), new_batch_state(kind)
    row = rows.new()
    loose = []
    for begin, end in zip((0, *cuts), cuts, strict=False):
        feed(rows, kind, row, tokens[begin:end])
        loose.append(unpage_record(rows, take_record(rows, row, begin)))
        mx.eval(loose[-1].arrays())
    stranger = elsewhere.new()
    feed(elsewhere, kind, stranger, [9] * 70)  # there are pages of others, and then free ones
    elsewhere.leave(stranger)
    spoil(elsewhere)
    records: list[Record] = []
    for each in loose:
        records.append(place_record(elsewhere, records, each))
    again = elsewhere.new()
    restore_row(elsewhere, again, records, cuts[-1])
    assert close(feed(elsewhere, kind, again, [3]), exact(kind, [*tokens, 3]))
    elsewhere.check()
