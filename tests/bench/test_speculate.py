from bench.speculate import Bench
from bench.synthetic import Synthetic
from ingot.engine.request import Request
from ingot.engine.sequence import Sequence

PROMPT, ANSWER = (1, 2, 3), tuple(range(10, 26))


def sequence() -> Sequence:
    return Sequence(Request("r", (PROMPT,), max_tokens=16), 0, 0, PROMPT, 16, 0)


def right(guess: tuple[int, ...]) -> int:
    return next((at for at, (one, other) in enumerate(zip(guess, ANSWER, strict=False)) if one != other), len(guess))


def test_guesses_are_right_as_often_as_is_asked_for() -> None:
    proposer, row = Synthetic({PROMPT: ANSWER}, (0.9, 0.5)), sequence()
    found = [right(proposer.propose([row], [4])[0].tokens) for _ in range(4000)]
    first = sum(count >= 1 for count in found)
    second = sum(count >= 2 for count in found)
    third = sum(count >= 3 for count in found)
    assert 0.87 < first / 4000 < 0.93
    assert 0.46 < second / first < 0.54
    assert 0.46 < third / second < 0.54  # the last rate goes on


def test_it_offers_nothing_where_it_does_not_know_what_comes() -> None:
    proposer, row = Synthetic({PROMPT: ANSWER}, (1.0,), most=4), sequence()
    row.tokens += ANSWER[:14]
    [offer] = proposer.offers([row])
    assert offer is not None and offer.free and proposer.propose([row], [4])[0].tokens == ANSWER[14:]
    row.tokens += ANSWER[14:]
    assert proposer.offers([row]) == [None]


def test_all_ways_are_measured_and_give_the_same_tokens() -> None:
    bench = Bench("dispatch", "float32", 0.1)
    try:
        figures = bench.figures(2, 0.9, [1, 3], prompt=8, output=24, turns=1)
    finally:
        bench.close()
    assert figures.same
    assert figures.plain > 0 and figures.auto > 0 and set(figures.fixed) == {1, 3} and figures.best >= 1
