import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.cache.layers import AppendState, RecurrentState, WindowState
from ingot.cache.records import Record, put, take
from ingot.cache.slots import Slots
from tests import tiny
from tests.cache.test_layers import KINDS, WIDEST, close, exact, feed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(300,), (5, 40, 41, 290, 300), (128, 256)])
def test_a_sequence_goes_on_from_its_records_as_if_it_had_never_stopped(kind: str, cuts: tuple[int, ...]) -> None:
    import mlx.core as mx

    rng = random.Random(4)
    tokens = [rng.randrange(95) for _ in range(cuts[-1])]
    slots = tiny.adapter(kind, WIDEST, exact=True).new_slots()
    slots.resize(2, 512)
    records: list[Record] = []
    for begin, end in zip((0, *cuts), cuts, strict=False):
        feed(slots, kind, 1, tokens[begin:end])
        records.append(take(slots, 1, begin))
        mx.eval(records[-1].arrays())
    feed(slots, kind, 1, [9] * 30)  # what the slot does afterwards is nothing to the records
    other = tiny.adapter(kind, WIDEST, exact=True).new_slots()
    other.resize(3, 1024)
    put(other, 2, records, cuts[-1])
    assert close(feed(other, kind, 2, [7, 8]), exact(kind, [*tokens, 7, 8]))


@pytest.mark.parametrize("kind", ["llama", "window"])
def test_a_split_record_covers_the_same_tokens(kind: str) -> None:
    tokens = [random.Random(1).randrange(95) for _ in range(100)]
    slots = tiny.adapter(kind, WIDEST, exact=True).new_slots()
    feed(slots, kind, 0, tokens)
    whole = take(slots, 0, 0)
    first, second = whole.split(37)
    assert (first.begin, first.end, second.begin, second.end) == (0, 37, 37, 100)
    assert first.nbytes + second.nbytes == whole.nbytes
    other = tiny.adapter(kind, WIDEST, exact=True).new_slots()
    put(other, 0, [first, second], 100)
    assert close(feed(other, kind, 0, [3]), exact(kind, [*tokens, 3]))


def test_a_record_does_not_keep_the_slots_arrays_alive() -> None:
    import mlx.core as mx

    slots = tiny.adapter("llama", WIDEST, exact=True).new_slots()
    slots.resize(2, 8192)
    feed(slots, "llama", 0, [1, 2, 3])
    record = take(slots, 0, 0)
    mx.eval(record.arrays())
    held = slots.nbytes
    before = mx.get_active_memory()
    del slots
    mx.clear_cache()
    assert before - mx.get_active_memory() >= 0.9 * held
    assert record.nbytes == 3 * 384


def held_apart(record: Record, slots: Slots) -> bool:
    import mlx.core as mx

    mx.eval(record.arrays(), slots.arrays())
    pairs = itertools.product(record.arrays(), slots.arrays())
    return not any(np.shares_memory(np.array(one, copy=False), np.array(other, copy=False)) for one, other in pairs)


@given(
    heads=st.integers(1, 3),
    size=st.integers(1, 9),
    slots=st.integers(1, 2),
    capacity=st.sampled_from([16, 256, 512]),
    window=st.integers(2, 40),
    begin=st.floats(0, 1),
    data=st.data(),
)
def test_a_record_shares_no_memory_with_slots_of_any_shape(
    heads: int, size: int, slots: int, capacity: int, window: int, begin: float, data: st.DataObject
) -> None:
    import mlx.core as mx

    def made() -> Slots:
        fresh = Slots([AppendState(), WindowState(window, capacity), RecurrentState(2)])
        fresh.resize(slots, capacity)
        return fresh

    live = made()
    length = data.draw(st.integers(1, capacity))
    with live.launch(slots - 1, 1, length) as (append, windowed, recurrent):
        for state in (append, windowed):
            new = mx.random.normal((1, heads, length, size), key=mx.random.key(2))
            state.update_and_fetch(new, 2 * new)
        recurrent[0], recurrent[1] = mx.random.normal((1, 3, size)), mx.random.normal((1, heads))
    record = take(live, slots - 1, 0)
    assert held_apart(record, live)
    cut = int(begin * length)
    parts = record.split(cut) if 0 < cut < length else (record,)
    assert all(held_apart(part, live) for part in parts)
    other = made()
    put(other, 0, [record], length)
    assert held_apart(record, other)


@pytest.mark.parametrize("kind", ["llama", "window"])
@pytest.mark.parametrize("gap", ["nothing", "beginning", "middle", "end"])
def test_a_slot_is_never_longer_than_what_was_written(kind: str, gap: str) -> None:
    """Whoever had the slot before must not be seen through a hole in the records."""
    slots = tiny.adapter(kind, WIDEST, exact=True).new_slots()
    feed(slots, kind, 0, [5] * 60)
    whole = take(slots, 0, 0)
    first, second = whole.split(55)  # within the window
    records = [first, second]
    layers = range(len(whole.deltas))
    for layer in layers:
        pieces = [record.deltas[layer] for record in records]
        assert pieces[0] is not None and pieces[1] is not None
        holed = {
            "nothing": [replace(piece, end=piece.begin, arrays=()) for piece in pieces if piece is not None],
            "beginning": [pieces[0].part(pieces[0].begin + 1, 55), pieces[1]],
            "middle": [pieces[0].part(0, 54), pieces[1]],
            "end": [pieces[0], pieces[1].part(55, 59)],
        }[gap]
        forged = [
            replace(record, deltas=tuple(hole if number == layer else record.deltas[number] for number in layers))
            for record, hole in zip(records, holed, strict=True)
        ]
        other = tiny.adapter(kind, WIDEST, exact=True).new_slots()
        with pytest.raises(RuntimeError, match=f"layer {layer} "):
            put(other, 0, forged, 60)
        assert other.lengths == [0]
    put(slots := tiny.adapter(kind, WIDEST, exact=True).new_slots(), 0, records, 60)
    assert slots.lengths == [60]
