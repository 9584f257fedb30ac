"""A comparison as lines on the terminal, as a page of Markdown, as JSON and as plots."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from ingot.cli import plots
from ingot.cli.peers.comparison import OURS, SIDES, THEIRS, Figure, Match, wins
from ingot.cli.peers.processes import KEPT_VARIABLES
from ingot.cli.peers.works import WORKS, Load
from ingot.version import __version__

NAME_WIDTH, CELL_WIDTH = 34, 13
PLOTTED: Final = 16
"""Figures of a plot: no more fit."""
TURNS: Final = ("agent", "next turn")
ABOUT_RATIOS: Final = (
    "Servers took turns step by step. A ratio says how many times better ingot is: above 1 it is ahead. It is the "
    "median over the steps, and in brackets are the least and the greatest of one step; where they lie on both sides "
    "of 1, the two are even. A time or rate that was measured once gives no verdict."
)
VERDICTS: Final = {"ahead": "#2a7f4f", "behind": "#b5472f", "even": "#777777"}


@dataclass(frozen=True, slots=True)
class Contender:
    """A server that took part."""

    name: str
    version: str
    command: str


@dataclass
class Report:
    model: str
    arguments: Sequence[str]
    load: Load
    contenders: list[Contender]
    matches: list[Match]
    notes: list[str]
    absent: list[tuple[str, str]]
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])

    def write(self, folder: Path) -> list[Path]:
        """`report.md`, `report.json` and, where matplotlib is installed, plots. Returns what was written."""
        folder.mkdir(parents=True, exist_ok=True)
        plotted = write_plots(folder, self.matches)
        page, data = folder / "report.md", folder / "report.json"
        page.write_text("\n".join(self.markdown(plotted)) + "\n", encoding="utf-8")
        data.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        return [page, data, *plotted]

    def markdown(self, plotted: Sequence[Path] = ()) -> Iterator[str]:
        yield from (f"# ingot and other servers, {self.model}", "")
        variables = [f"{name}={os.environ[name]}" for name in KEPT_VARIABLES if name in os.environ]
        yield from (f"    {' '.join([*variables, 'ingot', 'bench', 'peers', *self.arguments])}", "")
        machine = f"{platform.system()}, {_processor()}, {os.cpu_count()} cores"
        yield f"{machine}, with a load of {self.load_before:.1f} before the run. {ABOUT_RATIOS}"
        if self.load_before > (os.cpu_count() or 1) / 2:
            yield from (
                "",
                "**The machine was busy with other work**, so no time is that of an idle one, and ratios vary more.",
            )
        yield from ("", "| server | version | command |", "|---|---|---|")
        for each in self.contenders:
            yield f"| {each.name} | {each.version} | `{each.command}` |"
        for name, why in self.absent:
            yield f"| {name} | | {why} |"
        yield from ("", f"{wins(self.matches)[:1].upper()}{wins(self.matches)[1:]}.", "")
        yield from (f"![{path.stem}]({path.name})\n" for path in plotted if path.suffix == ".png")
        for match in self.matches:
            yield from markdown_table(match)
        if self.notes:
            yield from ("## Notes", "", *(f"- {note}" for note in self.notes))

    def as_json(self) -> dict[str, Any]:
        """Times are in seconds, memory in MB, shares from 0 to 1; steps are numbered."""
        return {
            "ingot": __version__,
            "model": self.model,
            "arguments": list(self.arguments),
            "machine": surroundings() | {"load_before": self.load_before},
            "load": {name: value for name, value in asdict(self.load).items() if name != "session"},
            "servers": [asdict(each) for each in self.contenders],
            "absent": dict(self.absent),
            "notes": self.notes,
            "matches": [
                {
                    "peer": match.peer,
                    "figures": [figure.as_json() for figure in match.figures],
                    "troubles": [asdict(trouble) for trouble in match.troubles],
                }
                for match in self.matches
            ],
        }


def surroundings() -> dict[str, Any]:
    """What figures depend on besides the servers. The load is that of the minute before."""
    found: dict[str, Any] = {
        "machine": platform.machine(),
        "system": platform.system(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
    }
    for name in ("ingot-mlx", "mlx", "mlx-lm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if named:
            return named[0]
    return platform.processor() or platform.machine()


def value_text(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit in ("%", "part"):
        return f"{value:.0%}"
    if unit == "s":
        return f"{value * 1e3:.0f} ms" if value < 9.95 else f"{value:.1f} s"
    return f"{value:.0f} MB" if unit == "MB" else f"{value:.1f}"


def ratio_text(figure: Figure) -> str:
    if figure.ratio is None or figure.spread is None:
        return ""
    least, most = figure.spread
    spread = f" ({least:.2f} to {most:.2f})" if len(figure.ratios) > 1 else ""
    return f"{figure.ratio:.2f}x{spread}"


def table_rows(match: Match) -> Iterator[list[str]]:
    """Cells: the figure, ours, theirs, the ratio, the verdict; by kind of work, in order."""
    order = [work.name for work in WORKS]
    found = [figure for figure in match.figures if figure.found[OURS] or figure.found[THEIRS]]
    for figure in sorted(found, key=lambda figure: order.index(figure.work)):
        ours, theirs = (value_text(figure.middle(side), figure.unit) for side in SIDES)
        yield [f"{figure.work}: {figure.name}", ours, theirs, ratio_text(figure), figure.verdict]


def terminal_head(match: Match) -> str:
    return f"{'':{NAME_WIDTH}} {'ingot':>{CELL_WIDTH}} {match.peer:>{CELL_WIDTH}}"


def terminal_lines(match: Match, work: str) -> Iterator[str]:
    """What there is to say of one kind of work."""
    for name, ours, theirs, ratio, verdict in table_rows(match):
        if name.startswith(f"{work}: "):
            yield f"{name:{NAME_WIDTH}} {ours:>{CELL_WIDTH}} {theirs:>{CELL_WIDTH}}  {ratio} {verdict}".rstrip()
    yield from (f"  {trouble}" for trouble in match.troubles if trouble.work == work)


def markdown_table(match: Match) -> Iterator[str]:
    yield from (f"## {match.peer}", "")
    yield from (f"| | ingot | {match.peer} | ratio | ingot is |", "|---|---|---|---|---|")
    for row in table_rows(match):
        yield f"| {' | '.join(row)} |"
    yield ""
    yield from (f"- {trouble}" for trouble in match.troubles)
    yield ""


def write_plots(folder: Path, matches: Sequence[Match]) -> list[Path]:
    """`ratios` and `turns`, each as PNG and SVG; nothing without matplotlib or without figures."""
    if not plots.available():
        return []
    drawn: list[Path] = []
    for name, draw in (("ratios", draw_ratios), ("turns", draw_turns)):
        paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
        if draw(matches, paths):
            drawn += paths
    return drawn


def draw_ratios(matches: Sequence[Match], paths: Sequence[Path]) -> bool:
    """How many times better ingot is, on a scale on which twice as good and half as good are as far from even."""
    found = [[figure for figure in match.figures if figure.ratio is not None] for match in matches]
    if not any(found):
        return False
    figure, grid = plots.panels(1, len(matches), height=1.2 + 0.3 * min(PLOTTED, max(map(len, found))))
    for axes, match, listed in zip(grid[0], matches, found, strict=True):
        shown = listed[:PLOTTED][::-1]
        for place, each in enumerate(shown):
            assert each.ratio is not None and each.spread is not None
            colour = VERDICTS.get(each.verdict, VERDICTS["even"])
            axes.plot(each.spread, (place, place), color=colour, linewidth=3, alpha=0.4)
            axes.plot([each.ratio], [place], "o", color=colour)
        axes.set_xscale("log")
        axes.axvline(1.0, color="black", linewidth=1)
        axes.set_yticks(range(len(shown)), [f"{each.work}: {each.name}" for each in shown])
        axes.set(title=f"over {match.peer}", xlabel="times better than it")
        axes.grid(alpha=0.3, axis="x")
    plots.save(figure, *paths)
    return True


def draw_turns(matches: Sequence[Match], paths: Sequence[Path]) -> bool:
    """The time to the first token of each of an agent's turns."""
    found = [each for match in matches if (each := match.figure(*TURNS)).steps]
    if not found:
        return False
    figure, grid = plots.panels(1, len(found))
    names = [match.peer for match in matches if match.figure(*TURNS).steps]
    for axes, name, each in zip(grid[0], names, found, strict=True):
        lines = {
            side: [each.found[number][step] for step in each.steps]
            for side, number in (("ingot", OURS), (name, THEIRS))
        }
        plots.draw(axes, each.steps, lines, marker="o")
        axes.set(title="an agent's turns", xlabel="turn", ylabel="seconds to the first token")
    plots.save(figure, *paths)
    return True
