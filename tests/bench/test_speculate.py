import mlx.core as mx
import pytest

from bench.random_models import SHAPES, decided
from bench.speculate import Bench, Figures, Turn, complain, in_turns, ratio
from bench.synthetic import Synthetic
from ingot.engine.request import Request
from ingot.engine.sequence import TokenSequence

PROMPT, ANSWER = (1, 2, 3), tuple(range(10, 26))


def sequence() -> TokenSequence:
    return TokenSequence(Request("r", (PROMPT,), max_tokens=16), 0, 0, PROMPT, 16, 0)


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


def test_it_says_how_many_guesses_are_judged() -> None:
    proposer, row = Synthetic({PROMPT: ANSWER}, (0.5,)), sequence()
    found = [right(proposer.propose([row], [4])[0].tokens) for _ in range(100)]
    assert proposer.judged == sum(min(count + 1, 4) for count in found)


def test_it_offers_nothing_where_it_does_not_know_what_comes() -> None:
    proposer, row = Synthetic({PROMPT: ANSWER}, (1.0,), most=4), sequence()
    row.tokens += ANSWER[:14]
    [offer] = proposer.offers([row])
    assert offer is not None and offer.free and proposer.propose([row], [4])[0].tokens == ANSWER[14:]
    row.tokens += ANSWER[14:]
    assert proposer.offers([row]) == [None]


def test_all_ways_are_measured_and_give_the_same_tokens() -> None:
    bench = Bench("dispatch", 0.1, fixed=True)
    try:
        figures = bench.figures(2, 0.9, [1, 3], output=24, pairs=2)
    finally:
        bench.close()
    assert figures.same and figures.as_asked
    assert bench._fixed.judged > 0  # the controller's own engine may find that nothing pays
    assert figures.plain > 0 and figures.auto > 0 and figures.auto_cpu > 0
    assert set(figures.fixed) == {1, 3} and figures.best >= 1


def test_without_fixed_depths_there_is_one_engine_and_the_best_is_plain() -> None:
    bench = Bench("dispatch", 0.1, fixed=False)
    try:
        figures = bench.figures(1, 0.2, [], output=16, pairs=1)
    finally:
        bench.close()
    assert figures.same and figures.fixed == {} and figures.best == 1.0


def turn(tokens: int, wall: float, cpu: float) -> Turn:
    return Turn(tokens, wall, cpu, {})


def test_a_ratio_is_the_median_of_pairs_so_that_what_slows_both_down_changes_nothing() -> None:
    plain = [turn(64, 1.0, 1.0), turn(64, 8.0, 1.0), turn(64, 1.0, 1.0)]
    auto = [turn(64, 0.5, 0.8), turn(64, 4.0, 0.8), turn(64, 0.1, 0.8)]
    assert ratio(auto, plain) == 2.0
    assert ratio(auto, plain, cpu=True) == 1.25


def test_turns_alternate_and_so_does_who_comes_first() -> None:
    order: list[str] = []

    def way(name: str) -> Turn:
        order.append(name)
        return turn(1, 1.0, 1.0)

    in_turns(lambda: way("a"), lambda: way("b"), 3)
    assert "".join(order) == "abbaab"
    order.clear()
    in_turns(lambda: way("a"), lambda: way("b"), 3, until=0.0)
    assert "".join(order) == "ab"  # one pair there is, however late it is


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_next_token_of_a_decided_model_is_a_function_of_the_last_by_a_wide_margin(dtype: mx.Dtype) -> None:
    config = SHAPES["dispatch"]
    model, vocab = decided(config, dtype=dtype), config["vocab_size"]
    tokens = mx.random.randint(0, vocab, (2, 64))
    logits = model(tokens)[:, -1].astype(mx.float32)
    second, first = mx.sort(logits, axis=-1)[:, -2:].T
    assert mx.argmax(logits, axis=-1).tolist() == ((tokens[:, -1] + 1) % vocab).tolist()
    assert mx.all(first > 1.5 * mx.abs(second))
    assert logits.dtype == mx.float32 and model.lm_head.weight.dtype == dtype


def figures(*, rate: float, right: int, same: bool = True) -> Figures:
    return Figures(1, rate, 3, 400, right, 100.0, 1.0, 1.0, {}, same)


@pytest.mark.parametrize(("rate", "right", "status"), [(0.65, 270, 0), (0.65, 32, 1), (0.2, 75, 0), (0.9, 200, 1)])
def test_figures_of_guesses_that_were_right_more_rarely_than_asked_are_an_error(
    rate: float, right: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complain([figures(rate=rate, right=right)]) == status
    assert (f"{right} of 400 guesses were right" in capsys.readouterr().err) == bool(status)


def test_other_tokens_are_an_error() -> None:
    assert complain([figures(rate=0.5, right=200, same=False)]) == 1
