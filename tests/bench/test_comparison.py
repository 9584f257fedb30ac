from __future__ import annotations

import pytest

from bench.comparison import Duel, Figures, middle, unequal
from bench.comparison_report import HEAD, Match, as_json, rows
from ingot.cli.bench import LoadLevel, RequestSample, summarise_level


def level(*, tokens: int = 8, prompt: int = 20, error: str | None = None) -> LoadLevel:
    """Two requests, one after the other."""
    samples = [
        RequestSample(start, start + 1.0, (start + 0.2, start + 0.9), prompt, tokens, error if start else None)
        for start in (0.0, 1.0)
    ]
    return summarise_level(1, samples)


def duel() -> Duel:
    ours = [Figures(200.0, 0.1, 0.01), Figures(300.0, 0.2, 0.02), Figures(100.0, 0.3, 0.03)]
    theirs = [Figures(100.0, 0.2, 0.01), Figures(100.0, 0.8, 0.01), Figures(200.0, 0.4, 0.06)]
    return Duel(4, ours, theirs)


def test_a_round_is_told_by_throughput_and_by_the_medians_over_its_requests() -> None:
    figures = Figures.of(level(tokens=8))
    assert figures.tokens_per_second == pytest.approx(8.0)
    assert figures.ttft == pytest.approx(0.2)
    assert figures.seconds_per_token == pytest.approx(0.1)


def test_medians_are_taken_of_each_figure_by_itself() -> None:
    assert middle(duel().ours) == Figures(200.0, 0.2, 0.02)


def test_the_ratio_is_that_of_the_medians_and_the_spread_that_of_single_rounds() -> None:
    assert duel().ratio == Figures(2.0, 0.5, 2.0)
    least, most = duel().spread
    assert (least.tokens_per_second, most.tokens_per_second) == (0.5, 3.0)
    assert (least.ttft, most.ttft) == (0.25, pytest.approx(0.75))


@pytest.mark.parametrize(
    ("throughput", "ttft", "ahead"), [(1.1, 0.9, True), (1.1, 1.1, False), (0.9, 0.9, False), (1.0, 0.9, False)]
)
def test_ahead_means_more_tokens_and_a_shorter_wait(throughput: float, ttft: float, ahead: bool) -> None:
    assert Duel(1, [Figures(throughput, ttft, 1.0)], [Figures(1.0, 1.0, 1.0)]).ahead is ahead


def test_equal_answers_to_equal_prompts_can_be_compared() -> None:
    assert unequal([level(), level()], 8) is None


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (level(tokens=5), "answers have 5.0 tokens instead of 8"),
        (level(prompt=21), "prompts were counted differently"),
        (level(error="gone"), "1 of 2 requests failed: gone"),
    ],
)
def test_what_cannot_be_compared_is_said(other: LoadLevel, reason: str) -> None:
    found = unequal([level(), other], 8)
    assert found is not None and reason in found


def test_a_table_row_stands_under_its_heading() -> None:
    lines = rows(duel(), "ingot", "another")
    assert [line.split()[-4] for line in lines[:2]] == ["ingot", "another"]
    assert all(len(line) == len(HEAD) for line in lines[:2])
    assert "2.00x     0.50x     2.00x" in lines[2]
    assert "throughput 0.50 to 3.00, TTFT 0.25 to 0.75" in lines[2]


def test_the_json_holds_every_round_the_medians_and_the_ratios() -> None:
    (found,) = as_json(Match("small", 20.0, 8, [duel()]), "ingot", "another")["levels"]
    assert found["streams"] == 4 and found["ahead"] is True
    assert len(found["ingot"]["rounds"]) == len(found["another"]["rounds"]) == 3
    assert found["ingot"]["median"]["tokens_per_second"] == 200.0
    assert found["ratio"]["ttft"] == 0.5
    assert found["ratio_of_rounds"]["most"]["tokens_per_second"] == 3.0
