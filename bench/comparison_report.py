"""A comparison as a table, as JSON and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import plots
from bench.comparison import NAMES, Duel, Figures, middle

HEAD = f"{'streams':>7}  {'':<14}{'tokens/s':>10}{'TTFT ms':>10}{'ms/token':>10}"


@dataclass(frozen=True, slots=True)
class Match:
    """All duels on one model. `prompt_tokens` is the mean, as the servers counted."""

    model: str
    prompt_tokens: float
    output_tokens: int
    duels: Sequence[Duel]


def rows(duel: Duel, ours: str, theirs: str) -> list[str]:
    least, most = duel.spread
    ratios = "".join(f"{value:>9.2f}x" for value in asdict(duel.ratio).values())
    spreads = ", ".join(
        f"{name} {low:.2f} to {high:.2f}"
        for name, low, high in zip(("throughput", "TTFT"), asdict(least).values(), asdict(most).values(), strict=False)
    )
    return [
        f"{duel.streams:>7}  {ours:<14}{_cells(middle(duel.ours))}",
        f"{'':>7}  {theirs:<14}{_cells(middle(duel.theirs))}",
        f"{'':>7}  {'ratio':<14}{ratios}   (rounds: {spreads})",
    ]


def _cells(figures: Figures) -> str:
    return f"{figures.tokens_per_second:>10.1f}{figures.ttft * 1e3:>10.1f}{figures.seconds_per_token * 1e3:>10.2f}"


def as_json(match: Match, ours: str, theirs: str) -> dict[str, Any]:
    """Times in seconds; every ratio is ours over theirs."""
    return {
        "model": match.model,
        "prompt_tokens": match.prompt_tokens,
        "output_tokens": match.output_tokens,
        "levels": [
            {
                "streams": duel.streams,
                ours: _rounds(duel.ours),
                theirs: _rounds(duel.theirs),
                "ratio": asdict(duel.ratio),
                "ratio_of_rounds": dict(zip(("least", "most"), map(asdict, duel.spread), strict=True)),
                "ahead": duel.ahead,
            }
            for duel in match.duels
        ],
    }


def _rounds(figures: Sequence[Figures]) -> dict[str, Any]:
    return {"median": asdict(middle(figures)), "rounds": [asdict(each) for each in figures]}


def write_plot(path: Path, matches: Sequence[Match], ours: str, theirs: str) -> None:
    figure, grid = plots.panels(len(matches), 3)
    for line, match in zip(grid, matches, strict=True):
        titles = ("tokens per second", "time to first token, ms", "time per token, ms")
        streams = [duel.streams for duel in match.duels]
        for axes, name, title, scale in zip(line, NAMES, titles, (1, 1e3, 1e3), strict=True):
            sides = {ours: [duel.ours for duel in match.duels], theirs: [duel.theirs for duel in match.duels]}
            medians = {side: [asdict(middle(each))[name] * scale for each in found] for side, found in sides.items()}
            plots.draw(axes, streams, medians, marker="o")
            axes.set(title=f"{match.model}: {title}", xlabel="streams at once", xticks=streams)
    plots.save(figure, path)
