"""Scores: what is noted down, and where in memory it can be replayed."""

from __future__ import annotations

import mlx.core as mx
from hypothesis import given
from hypothesis import strategies as st

from ingot.kernels.gpu.scores import ALIGNED, Score
from ingot.kernels.gpu.texts import Kernel, Output, Work

SUM = Kernel("test", "sum", ("one", "other"), ("sum",), "", "sum[0] = one[0] + other[0] + one_shape[0];")


def launch(score: Score, one: mx.array, other: mx.array, size: int) -> mx.array:
    [made] = score(SUM, [one, other], Work((), (1, 1, 1), 32, (Output((size,), mx.float32),)))
    return made


@given(
    sizes=st.lists(st.integers(0, 900), min_size=1, max_size=40),
    picks=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=40, max_size=40),
)
def test_nothing_that_is_still_read_shares_its_memory(sizes: list[int], picks: list[tuple[int, int]]) -> None:
    score = Score()
    known = [score.give((7,), mx.float32), score.give((100, 3), mx.float32)]
    for size, (one, other) in zip(sizes, picks, strict=False):
        known.append(launch(score, known[one % len(known)], known[other % len(known)], size))
    score.result = known[-1]
    places, whole = score.layout()

    begun = {id(array): 0 for array in score.given}
    ended = {id(score.result): len(score.notes)}
    for when, note in enumerate(score.notes):
        for array in note.outputs:
            begun[id(array)] = when
        for array in (*note.inputs, *note.outputs):
            ended[id(array)] = max(when, ended.get(id(array), 0))
    alive = [(places[id(array)], array.nbytes, begun[id(array)], ended.get(id(array), 0)) for array in known]
    for number, (begin, size, first, last) in enumerate(alive):
        assert begin % ALIGNED == 0 and begin + size <= whole
        for other, more, start, end in alive[:number]:
            together = first <= end and start <= last
            assert not together or begin + size <= other or other + more <= begin


def test_memory_that_nobody_reads_any_more_is_used_again() -> None:
    score = Score()
    x = score.give((1024,), mx.float32)
    for _ in range(50):
        x = launch(score, x, x, 1024)
    score.result = x
    assert score.layout()[1] == 2 * 4096


def test_what_is_neither_given_nor_made_is_kept() -> None:
    score, weight = Score(), mx.ones(3)
    made = launch(score, score.give((3,), mx.float32), weight, 3)
    launch(score, made, weight, 3)
    assert [id(array) for array in score.fixed()] == [id(weight)]


def test_numbers_in_another_shape_are_the_same_numbers() -> None:
    score = Score()
    x = score.give((2, 6), mx.float32)
    view = score.shaped(score.shaped(x, (3, 4)), (12,))
    made = launch(score, view, view, 1)
    assert score.origin(view) is x and score.origin(made) is made
    assert score.notes[0].sizes == [12], "kernels are told the shape that they were given"
    assert not score.fixed()


def test_kinds_are_told_once() -> None:
    score = Score()
    x = score.give((3,), mx.float32)
    launch(score, launch(score, x, x, 3), x, 3)
    assert len(score.kinds) == 1
