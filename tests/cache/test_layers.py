"""Live states against the simplest thing that can be right: the whole sequence computed again without any cache."""

import random
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.records import Record, put, take
from ingot.cache.slots import Slots
from tests import tiny

KINDS = ["llama", "window", "hybrid", "moe"]
WIDEST = 32
ROUNDED = 1 << 16  # what GPUs round small arrays up to, all together
TOLERANCE = 2e-4


def exact(kind: str, tokens: list[int]) -> mx.array:
    """Logits after `tokens`, with caches of mlx-lm's own."""
    from ingot.upstream import caches

    model = REFERENCE.setdefault(kind, tiny.build(kind))
    return model(mx.array([tokens]), cache=caches.make_prompt_cache(model))[0, -1]


REFERENCE: dict[str, Any] = {}


def feed(slots: Slots, kind: str, slot: int, tokens: list[int]) -> mx.array:
    adapter = tiny.adapter(kind, WIDEST, exact=True)
    logits = mx.array(0)
    for begin in range(0, len(tokens), WIDEST):
        chunk = tokens[begin : begin + WIDEST]
        with slots.launch(slot, 1, len(chunk)) as layers:
            logits = adapter.forward(mx.array([chunk]), layers, [len(chunk) - 1])
            mx.eval(logits, slots.arrays())
    return logits[0, 0]


def close(one: mx.array, other: mx.array) -> bool:
    return mx.abs(one - other).max().item() < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_longer_than_window_and_buffer_gives_the_same_logits(kind: str) -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(96) for _ in range(400)]
    slots = tiny.adapter(kind, WIDEST, exact=True).new_slots()
    slots.resize(1, 512)
    assert close(feed(slots, kind, 0, tokens[:-1]), exact(kind, tokens[:-1]))
    assert close(feed(slots, kind, 0, tokens[-1:]), exact(kind, tokens))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["grow", "step", "swap", "move", "resize", "group"]), st.integers(0, 99)), max_size=12
    )
)
def test_rows_hold_their_own_whatever_happens_to_the_others(kind: str, moves: list[tuple[str, int]]) -> None:
    rng = random.Random(5)
    adapter = tiny.adapter(kind, WIDEST, exact=True)
    slots = adapter.new_slots()
    slots.resize(4, 256)
    rows: list[list[int]] = []

    def fresh(count: int) -> list[int]:
        return [rng.randrange(96) for _ in range(count)]

    def launch(chunks: list[list[int]], first: int) -> None:
        width = max(len(chunk) for chunk in chunks)
        padded = [chunk + [0] * (width - len(chunk)) for chunk in chunks]
        with slots.launch(first, len(chunks), width, [len(chunk) for chunk in chunks]) as layers:
            logits = adapter.forward(mx.array(padded), layers, [len(chunk) - 1 for chunk in chunks])
            mx.eval(logits, slots.arrays())
        for row, chunk, own in zip(rows[first:], chunks, logits[:, 0], strict=False):
            row += chunk
            assert close(own, exact(kind, row))

    for move, number in moves:
        if move == "grow" and len(rows) < 4:
            rows.append([])
            launch([fresh(1 + number % WIDEST)], len(rows) - 1)
        elif move == "step" and rows:
            launch([fresh(1) for _ in rows], 0)
        elif move == "group" and rows:
            launch([fresh(1 + (number + 3 * i) % 9) for i in range(len(rows))], 0)
        elif move == "swap" and len(rows) > 1:
            one, other = number % len(rows), (number + 1) % len(rows)
            slots.swap(one, other)
            rows[one], rows[other] = rows[other], rows[one]
        elif move == "move" and len(rows) > 1:
            target = number % (len(rows) - 1)
            slots.clear(target)
            slots.move(len(rows) - 1, target)
            rows[target] = rows.pop()
        elif move == "resize":
            slots.resize(4 if len(rows) > 2 else 2 + number % 3, 256 + 256 * (number % 2))
            slots.resize(max(4, slots.count), 512)
    if rows:
        launch([fresh(1) for _ in rows], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cleared_slot_starts_afresh(kind: str) -> None:
    slots = tiny.adapter(kind, WIDEST, exact=True).new_slots()
    slots.resize(2, 256)
    feed(slots, kind, 1, [5] * 20)
    slots.clear(1)
    assert close(feed(slots, kind, 1, [1, 2, 3]), exact(kind, [1, 2, 3]))


def test_a_window_layer_holds_no_more_than_its_window_and_one_launch() -> None:
    slots = tiny.adapter("window", WIDEST, exact=True).new_slots()
    slots.resize(1, 4096)
    feed(slots, "window", 0, [3] * 600)
    sizes = {state.kind: state.arrays()[0].shape[2] for state in slots.states}
    assert sizes == {"append": 4096, "window": 256}


def test_a_launch_that_fails_leaves_the_lengths_as_they_were() -> None:
    slots = tiny.adapter("llama", WIDEST, exact=True).new_slots()
    feed(slots, "llama", 0, [1, 2, 3])
    with pytest.raises(RuntimeError), slots.launch(0, 1, 4):
        raise RuntimeError
    assert slots.lengths == [3]
    assert close(feed(slots, "llama", 0, [4]), exact("llama", [1, 2, 3, 4]))


def test_decoding_writes_in_place() -> None:
    slots = tiny.adapter("llama", WIDEST, exact=True).new_slots()
    slots.resize(2, 65536)
    feed(slots, "llama", 0, [1, 2, 3])
    feed(slots, "llama", 1, [1])
    adapter = tiny.adapter("llama", WIDEST, exact=True)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        with slots.launch(0, 2, 1) as layers:
            logits = adapter.forward(mx.array([[1], [2]]), layers)
        mx.eval(logits, slots.arrays())
        del logits
    assert mx.get_peak_memory() - before < slots.arrays()[0].nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_moving_rows_takes_no_more_memory_than_the_largest_layer(kind: str) -> None:
    slots = tiny.adapter(kind, WIDEST, exact=True).new_slots()
    slots.resize(4, 16384)
    feed(slots, kind, 0, [1, 2, 3] * 20)
    feed(slots, kind, 1, [4, 5])
    largest = max(sum(array.nbytes for array in state.arrays()) for state in slots.states)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    slots.swap(0, 1)
    slots.clear(0)
    slots.move(1, 0)
    mx.eval(slots.arrays())
    assert mx.get_peak_memory() - before <= largest + ROUNDED
    assert slots.lengths == [60, 0, 0, 0]
    assert close(feed(slots, kind, 0, [7]), exact(kind, [*[1, 2, 3] * 20, 7]))


@pytest.mark.parametrize("kind", KINDS)
def test_moving_a_row_that_holds_nothing_asks_mlx_for_nothing_empty(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On some processors MLX ends the process when it is to gather or scatter no values at all."""
    slots = tiny.adapter(kind, WIDEST, exact=True).new_slots()
    slots.resize(3, 64)
    feed(slots, kind, 0, [1, 2, 3])
    taken: list[mx.array] = []
    take = mx.take
    monkeypatch.setattr(mx, "take", lambda *given, **named: taken.append(take(*given, **named)) or taken[-1])
    slots.swap(1, 2)
    slots.move(2, 1)
    assert all(array.size for array in taken)
    slots.swap(0, 2)
    assert slots.lengths == [0, 0, 3]
    assert close(feed(slots, kind, 2, [4]), exact(kind, [1, 2, 3, 4]))


def left_in(slots: Slots, slot: int) -> bool:
    """Whether a slot's memory holds anything but zeros."""
    return any(mx.any(array[slot] != 0).item() for array in slots.arrays())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["grow", "pad", "swap", "move", "clear", "resize", "restore"]), st.integers(0, 99)),
        max_size=10,
    )
)
def test_a_free_slot_holds_nothing_of_whoever_had_it(kind: str, moves: list[tuple[str, int]]) -> None:
    adapter = tiny.adapter(kind, WIDEST, exact=True)
    slots = adapter.new_slots()
    slots.resize(3, 256)
    record: Record | None = None
    for move, number in moves:
        slot, other = number % 3, (number + 1) % 3
        if move == "grow" and slots.lengths[slot] < 200:
            feed(slots, kind, slot, [1 + number % 90] * (1 + number % WIDEST))
            record = take(slots, slot, 0)
        elif move == "pad" and slots.lengths[0] and slots.lengths[1] and max(slots.lengths) < 200:
            with slots.launch(0, 2, 9, [1 + number % 9, 9]) as layers:
                mx.eval(adapter.forward(mx.array([[number] * 9] * 2), layers), slots.arrays())
        elif move == "swap":
            slots.swap(slot, other)
        elif move == "move" and not slots.lengths[other]:
            slots.move(slot, other)
        elif move == "clear":
            slots.clear(slot)
        elif move == "resize":
            slots.resize(3, 256 + 256 * (number % 2))
        elif move == "restore" and record is not None and not slots.lengths[slot] and record.end < 200:
            put(slots, slot, [record], record.end)
        for free in range(3):
            assert slots.lengths[free] or not left_in(slots, free)
