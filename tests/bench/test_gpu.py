"""The benchmark of GPUs, on a CPU that acts as one: its figures say nothing, but it has to run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bench.children import Outcome
from bench.gpu import __main__ as gpu
from bench.gpu import stock
from bench.gpu.goals import DIFFERING, GOALS, Figure, Goal, table
from bench.gpu.scale import TINY, Scale
from ingot.kernels.paged_attention.kernels import has_paged_kernels
from tests import engines

emulated = pytest.mark.skipif(
    not has_paged_kernels(engines.GPU), reason="kernels run on no device here, nor can be emulated"
)


@pytest.fixture(autouse=True)
def as_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_AS", "cuda")


def test_a_line_has_what_was_found_its_goal_and_the_ratio_to_mlx_lm() -> None:
    figures = [Figure("8B bf16, 1 stream", 240, "tok/s", 120), Figure("llama: batched", 1, DIFFERING)]
    _, first, second = table(figures).splitlines()
    assert ">= 200 yes" in first and "2.00" in first
    assert "<= 0 NO" in second


def test_a_goal_is_a_bound_on_one_side() -> None:
    assert Goal(least=2).met(2) and not Goal(least=2).met(1.9)
    assert Goal(most=2).met(2) and not Goal(most=2).met(float("nan"))


@emulated
@pytest.mark.parametrize("name", ["attention", "delta", "recurrent", "dense", "hybrid", "long", "turn", "mtp"])
def test_a_section_finds_figures(name: str) -> None:
    found = list(gpu.work_of(name)(TINY))
    assert len(found) >= 3 and all(figure.value > 0 for figure in found)


@emulated
def test_a_family_is_measured_beside_mlx_lm() -> None:
    found = {figure.name: figure for figure in gpu.work_of("family/gemma3")(TINY)}
    assert [*found] == [f"gemma3 4-bit, {what}" for what in ("1 stream", "2 unequal streams", "prefill")]
    assert found["gemma3 4-bit, 1 stream"].beside is not None


@emulated
def test_ours_are_told_before_mlx_lms_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Figure] = []
    measured = stock.measured

    def after(*given: Any) -> Iterator[tuple[str, float]]:
        assert [figure.name.split(", ")[1] for figure in told] == ["1 stream", "2 unequal streams", "prefill"]
        return measured(*given)

    monkeypatch.setattr(stock, "measured", after)
    for figure in gpu.work_of("packed")(TINY):
        told.append(figure)
    *ours, again = told
    assert again.beside is not None and again == replace(ours[0], beside=again.beside)


def test_a_figure_that_is_told_again_takes_the_earlier_ones_place(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, beside = Figure("8B bf16, 1 stream", 240, "tok/s"), Figure("8B bf16, 1 stream", 240, "tok/s", 120)

    def hear(command: object, environment: object, limit_s: float, told: Callable[[str], None]) -> Outcome:
        for figure in (alone, Figure("second", 1, "ms"), beside):
            told(gpu.FIGURE + json.dumps(asdict(figure)))
        return Outcome(None, ())

    monkeypatch.setattr(gpu, "hear", hear)
    assert gpu.run("dense", "") == ([beside, Figure("second", 1, "ms")], None)


def test_figures_in_full_are_called_what_the_goals_are_for() -> None:
    """Sections name figures by the numbers of streams: another one would have no goal, unnoticed."""
    streams = [f"{name}, {count} unequal streams" for name, count in (("8B bf16", 32), ("8B 4-bit", 8))]
    assert {*streams, "8B bf16, host time of a step of 32"} <= set(GOALS)
    assert gpu.FULL.streams == (1, 8, 32)


def test_a_section_that_takes_too_long_is_reported_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hurried = {name: replace(section, limit_s=0.01) for name, section in gpu.SECTIONS.items()}
    monkeypatch.setattr(gpu, "SECTIONS", hurried)
    assert gpu.main(["--tiny", "--only", "attention,long", "--json", str(tmp_path / "found.json")]) == 1
    said = capsys.readouterr().out
    assert "only the checks mean anything" in said
    assert "NOT MEASURED: attention, which took more than 0 s" in said and "NOT MEASURED: long" in said
    assert set(json.loads((tmp_path / "found.json").read_text())["failed"]) == {"attention", "long"}


def test_a_section_that_takes_too_long_loses_only_what_it_did_not_come_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = gpu.FIGURE + json.dumps(asdict(Figure("8B bf16, 1 stream", 240, "tok/s")))

    def hear(command: object, environment: object, limit_s: float, told: Callable[[str], None]) -> Outcome:
        told("a library says hello")
        told(line)
        return Outcome("took more than 85 s", ())

    monkeypatch.setattr(gpu, "hear", hear)
    assert gpu.main(["--only", "dense", "--json", str(tmp_path / "found.json")]) == 1
    said = capsys.readouterr()
    assert "8B bf16, 1 stream" in said.out and "8B bf16, 1 stream" in said.err
    assert "NOT ALL MEASURED: dense, which took more than 85 s, after 1 figures" in said.out
    assert json.loads((tmp_path / "found.json").read_text())["figures"][0]["value"] == 240


def test_a_child_says_each_figure_when_it_has_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(scale: Scale) -> Iterator[Figure]:
        yield Figure("first", 1, "ms")
        assert "first" in capsys.readouterr().out
        yield Figure("second", 2, "ms")

    monkeypatch.setattr(gpu, "work_of", lambda name: measure)
    assert gpu.main(["--tiny", "--child", "delta"]) == 0
    assert "second" in capsys.readouterr().out


def test_all_of_it_takes_less_than_a_quarter_of_an_hour() -> None:
    assert gpu.SECTIONS["checks"].limit_s <= 100
    assert sum(section.limit_s for section in gpu.SECTIONS.values()) < 15 * 60


def test_an_unknown_section_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--only", "atention"])
    assert "there is no section 'atention'" in capsys.readouterr().err
