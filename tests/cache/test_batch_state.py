"""Live states against the simplest thing that can be right: the whole sequence computed again without any cache."""

import random
from itertools import accumulate
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.attention_state import AppendState
from ingot.cache.batch_state import BatchState
from ingot.cache.forward_batch import ForwardPart, Row
from ingot.cache.kv_storage import SlabStorage
from ingot.cache.pages import PAGE
from ingot.cache.records import restore_row, take_record
from ingot.kernels.device import Device, current_device
from ingot.models.adapter import adapt_model
from tests import tiny
from tests.engines import GPU
from tests.memory import freed_at_once, settled

pytestmark = pytest.mark.usefixtures("rules")

LAYER_KINDS = ["llama", "window", "hybrid"]
KINDS = [*LAYER_KINDS, "moe"]
WIDEST = 32
TOLERANCE = 2e-4


def exact(kind: str, tokens: list[int]) -> mx.array:
    """Logits after `tokens`, with caches of mlx-lm's own."""
    from ingot.upstream import caches

    model = REFERENCE.setdefault(kind, tiny.build(kind))
    return model(mx.array([tokens]), cache=caches.make_prompt_cache(model))[0, -1]


REFERENCE: dict[str, Any] = {}


def new_batch_state(kind: str) -> BatchState:
    return tiny.adapter(kind, WIDEST, exact=True).new_batch_state()


def feed(rows: BatchState, kind: str, row: Row, tokens: list[int]) -> mx.array:
    """Logits [vocab] after the last of them."""
    for begin in range(0, len(tokens), WIDEST):
        [logits] = run(rows, kind, [[(row, tokens[begin : begin + WIDEST])]])
    return logits


def run(rows: BatchState, kind: str, parts: list[list[tuple[Row, list[int]]]], tentative: int = 0) -> list[mx.array]:
    """Logits after each row's last token, all in one forward pass."""
    fed = [each for part in parts for each in part]
    ends = list(accumulate(len(tokens) for _, tokens in fed))
    logits = tiny.adapter(kind, WIDEST, exact=True).run(
        rows,
        mx.array([token for _, tokens in fed for token in tokens]),
        [ForwardPart(tuple(row for row, _ in part), len(part[0][1]), tentative=tentative) for part in parts],
        [end - 1 for end in ends],
    )
    mx.eval(logits, rows.pending())
    return list(logits)


def spoil(rows: BatchState) -> None:
    """Leave what is no number wherever nobody holds anything: whoever meets it shows it."""
    for group in rows.groups:
        free = set(group.pages.free)
        runs = [(0, PAGE, page, 0) for page in free]
        for storage in group.storages:
            nothing = [mx.full((PAGE, storage.heads, size), mx.nan) for size in storage.sizes]
            storage.write(nothing[0], nothing[1], runs)
    mx.eval(rows.pending())


def close(one: mx.array, other: mx.array) -> bool:
    return mx.abs(one - other).max().item() < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_longer_than_windows_and_pages_gives_the_same_logits(kind: str) -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(96) for _ in range(400)]
    rows = new_batch_state(kind)
    row = rows.new()
    assert close(feed(rows, kind, row, tokens[:-1]), exact(kind, tokens[:-1]))
    assert close(feed(rows, kind, row, tokens[-1:]), exact(kind, tokens))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=settings().max_examples // 3)
@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from(["join", "leave", "step", "beside", "branch", "keep", "fail", "guess"]), st.integers(0, 99)
        ),
        max_size=12,
    )
)
def test_rows_hold_their_own_whatever_happens_to_the_others(kind: str, moves: list[tuple[str, int]]) -> None:
    rng = random.Random(5)
    rows = new_batch_state(kind)
    live: list[tuple[Row, list[int]]] = []
    kept: list[tuple[Any, list[int]]] = []

    def fresh(count: int) -> list[int]:
        return [rng.randrange(96) for _ in range(count)]

    def compute(parts: list[list[tuple[tuple[Row, list[int]], list[int]]]]) -> None:
        logits = run(rows, kind, [[(row, new) for (row, _), new in part] for part in parts])
        for ((_, own), new), found in zip([each for part in parts for each in part], logits, strict=True):
            own += new
            assert close(found, exact(kind, own))

    for move, number in moves:
        one = number % len(live) if live else 0
        if move == "join" and len(live) < 4:
            live.append((rows.new(), []))
            compute([[(live[-1], fresh(1 + number % WIDEST))]])
        elif move == "leave" and live:
            rows.leave(live.pop(one)[0])
            spoil(rows)
        elif move == "step" and live:
            compute([[(each, fresh(1)) for each in live]])
        elif move == "beside" and len(live) > 1:
            others = [each for at, each in enumerate(live) if at != one]
            compute([[(each, fresh(1)) for each in others], [(live[one], fresh(2 + number % 9))]])
        elif move == "keep" and live:
            kept.append((take_record(rows, live[one][0], 0), list(live[one][1])))
        elif move == "branch" and kept and len(live) < 4:
            record, tokens = kept[number % len(kept)]
            live.append((rows.new(), list(tokens)))
            restore_row(rows, live[-1][0], [record], len(tokens))
            compute([[(live[-1], fresh(1))]])
        elif move == "fail" and live:
            with pytest.raises(RuntimeError), rows.launch([ForwardPart((live[one][0],), 1 + number % WIDEST)]):
                raise RuntimeError
        elif move == "guess" and live:
            tentative = number % 7
            guessed = [fresh(1 + tentative) for _ in live]
            parts = [[(row, new) for (row, _), new in zip(live, guessed, strict=True)]]
            run(rows, kind, parts, tentative=tentative)
            for (row, own), new in zip(live, guessed, strict=True):
                asked = len(own) + 1 + rng.randrange(tentative + 1)
                own += new[: rows.rewind(row, asked) - len(own)]
                assert row.length == row.position == len(own)
                assert row.length == asked or ("recurrent" in rows.kinds and row.length < asked)
    if live:
        compute([[(each, fresh(1)) for each in live]])
    rows.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_sees_nothing_of_whoever_had_its_memory_before(kind: str) -> None:
    rows = new_batch_state(kind)
    other, row = rows.new(), rows.new()
    feed(rows, kind, other, [5] * 200)
    rows.leave(other)
    spoil(rows)
    assert close(feed(rows, kind, row, [1, 2, 3]), exact(kind, [1, 2, 3]))
    beside = rows.new()
    feed(rows, kind, beside, [4] * 70)
    short, long = run(rows, kind, [[(row, [4]), (beside, [4])]])
    assert close(short, exact(kind, [1, 2, 3, 4])) and close(long, exact(kind, [4] * 71))


def test_a_window_layer_holds_the_pages_that_its_window_lies_in() -> None:
    rows = new_batch_state("window")
    row = rows.new()
    feed(rows, "window", row, [3] * 600)
    held = {group.window: len(table.numbers) for group, table in zip(rows.groups, row.tables, strict=True)}
    assert held == {None: 10, 12: 1}


@pytest.mark.parametrize("kind", KINDS)
def test_a_launch_that_fails_leaves_the_rows_as_they_were(kind: str) -> None:
    rows = new_batch_state(kind)
    row = rows.new()
    feed(rows, kind, row, [1, 2, 3])
    with pytest.raises(RuntimeError), rows.launch([ForwardPart((row,), 200)]):
        raise RuntimeError
    assert row.length == 3
    assert close(feed(rows, kind, row, [4]), exact(kind, [1, 2, 3, 4]))
    rows.check()


def test_many_rows_that_share_a_prompt_hold_it_once() -> None:
    rows = new_batch_state("llama")
    first = rows.new()
    prompt = [number % 90 for number in range(6 * PAGE + 7)]
    feed(rows, "llama", first, prompt)
    record = take_record(rows, first, 0)
    agents = [rows.new() for _ in range(4)]
    for agent in agents:
        restore_row(rows, agent, [record], len(prompt))
    [group] = rows.groups
    assert group.pages.used == 7, "a hit takes no pages"
    for number, agent in enumerate(agents):
        own = feed(rows, "llama", agent, [number])
        assert close(own, exact("llama", [*prompt, number]))
    # One of them goes on in the open page, the others each in a copy of it.
    assert group.pages.used == 7 + 3


def test_growing_copies_nobodys_states() -> None:
    rows = new_batch_state("llama")
    row, other = rows.new(), rows.new()
    feed(rows, "llama", other, [2] * 30)
    feed(rows, "llama", row, [1] * 100)
    before = [list(table.numbers) for table in (*row.tables, *other.tables)]
    feed(rows, "llama", row, [1] * 700)
    after = [list(table.numbers) for table in (*row.tables, *other.tables)]
    assert [new[: len(old)] for new, old in zip(after, before, strict=True)] == before


def test_memory_is_at_most_a_quarter_more_than_what_is_held() -> None:
    rows = new_batch_state("llama")
    row = rows.new()
    for _ in range(12):
        feed(rows, "llama", row, [1] * 4 * PAGE)
        [group] = rows.groups
        held = group.pages.used * group.page_bytes
        assert held <= rows.nbytes <= 1.25 * held + 4 * group.page_bytes


@freed_at_once
def test_decoding_writes_in_place() -> None:
    rows = new_batch_state("llama")
    one, other = rows.new(), rows.new()
    feed(rows, "llama", one, [1, 2, 3] * 600)
    feed(rows, "llama", other, [1])
    before = settled()
    for _ in range(3):
        run(rows, "llama", [[(one, [1]), (other, [2])]])
    state = rows.states[0]
    assert isinstance(state, AppendState)
    read = 2 * 2 * 1900 * state.stored.token_bytes * (2 if isinstance(state.storage, SlabStorage) else 0)
    assert mx.get_peak_memory() - before < 2 * read + rows.nbytes / 4 + (1 << 18)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_is_given_back_when_nothing_runs(kind: str) -> None:
    rows = new_batch_state(kind)
    row = rows.new()
    feed(rows, kind, row, [7] * 500)
    record = take_record(rows, row, 0)
    rows.leave(row)
    rows.trim()
    again = rows.new()
    restore_row(rows, again, [record], 500)
    assert close(feed(rows, kind, again, [3]), exact(kind, [*[7] * 500, 3]))
    rows.leave(again)
    del record
    rows.trim()
    assert all(group.pages.used == 0 for group in rows.groups)
    assert rows.nbytes <= rows.slot_bytes


PLACED = [(kind, device) for kind in ("llama", "window", "moe") for device in (None, GPU)]


def placed(
    kind: str, device: Device | None, parts: list[tuple[list[int], list[int] | None]], begin: int = 0
) -> mx.array:
    """Logits after a sequence whose pieces have stated positions, or go on from the ones before."""
    adapter = adapt_model(tiny.build(kind), tiny.CONFIGS[kind], device or current_device(), widest=WIDEST, exact=True)
    rows = adapter.new_batch_state()
    row = rows.new()
    row.position = begin
    for tokens, at in parts:
        stated = None if at is None else mx.array(at)
        part = ForwardPart((row,), len(tokens), stated, None if at is None else at[-1] + 1)
        logits = adapter.run(rows, mx.array(tokens), [part], [len(tokens) - 1])
        mx.eval(logits, rows.pending())
    return logits[0]


@pytest.mark.parametrize(("kind", "device"), PLACED)
def test_where_a_sequence_stands_is_not_where_it_is_stored(kind: str, device: Device | None) -> None:
    """RoPE sees distances alone: a sequence that begins anywhere is the same sequence."""
    tokens = [3, 14, 15, 9, 26, 5, 35, 8]
    assert close(placed(kind, device, [(tokens, None)], begin=1000), exact(kind, tokens))


@pytest.mark.parametrize(("kind", "device"), PLACED)
def test_positions_may_leave_gaps(kind: str, device: Device | None) -> None:
    """Stated ones, in whatever pieces, and those that go on from them."""
    tokens, at = [3, 14, 15, 9, 26], [0, 1, 2, 40, 41]
    whole = placed(kind, device, [(tokens, at)])
    assert close(placed(kind, device, [(tokens[:3], None), (tokens[3:4], [40]), (tokens[4:], None)]), whole)
    assert close(placed(kind, None if device else GPU, [(tokens, at)]), whole), "two kinds of attention agree on it"
    assert not close(exact(kind, tokens), whole)
