"""Two servers that take turns at the same work: what each found, step by step, and the ratios of that.

A ratio says how many times better ingot is: of times it is theirs over ours, of rates ours over theirs. Each step gives
one, and what is reported is their median, with the least and the greatest. Shares have a difference instead.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ingot.cli.client import ServerError
from ingot.cli.peers.processes import Server
from ingot.cli.peers.works import Figures, Load, NotSupported, Work

OURS, THEIRS = 0, 1
SIDES: Final = (OURS, THEIRS)
ODD_ANSWERS: Final = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""What comes of an answer that is not what its protocol says."""
UNITS: Final = {
    "tokens/s": "tokens/s",
    "at rest": "MB",
    "at its peak": "MB",
    "tokens of an answer": "tokens",
    "speed it keeps": "part",  # of two times, which vary as times do
}
SHARES: Final = ("reused", "right", "cached", "valid", "answered", "refused", "failed")
MEMORY_NOISE: Final = 0.05
"""Of a process that does the same again."""
WORSE_IF_MORE: Final = ("failed", "refused")


@dataclass
class Figure:
    """One thing that was measured, on both sides, by step. A step that one side lacks gives no ratio."""

    work: str
    name: str
    found: tuple[dict[int, float], dict[int, float]] = field(default_factory=lambda: ({}, {}))

    @property
    def unit(self) -> str:
        last = self.name.rpartition(": ")[2]
        if last in UNITS:
            return UNITS[last]
        return "%" if last.startswith(SHARES) else "s"

    @property
    def more_is_better(self) -> bool:
        last = self.name.rpartition(": ")[2]
        return self.unit in ("%", "part", "tokens/s", "tokens") and not last.startswith(WORSE_IF_MORE)

    def middle(self, side: int) -> float | None:
        """The median, or the mean of shares."""
        values = list(self.found[side].values())
        if not values:
            return None
        return statistics.fmean(values) if self.unit == "%" else statistics.median(values)

    @property
    def ratios(self) -> list[float]:
        """How many times better ours is, by step; none of shares."""
        if self.unit in ("%", "tokens"):
            return []
        pairs = [(self.found[OURS][step], self.found[THEIRS][step]) for step in self.steps]
        best = [(ours, theirs) if self.more_is_better else (theirs, ours) for ours, theirs in pairs]
        return [high / low for high, low in best if high > 0 and low > 0]

    @property
    def steps(self) -> list[int]:
        return sorted(self.found[OURS].keys() & self.found[THEIRS].keys())

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def spread(self) -> tuple[float, float] | None:
        return (min(self.ratios), max(self.ratios)) if self.ratios else None

    @property
    def verdict(self) -> str:
        """`ahead`, `behind` or `even`; empty where nothing can be compared. Ratios that lie on both sides of one are
        even: another run might say the opposite. A time or rate that was measured once gives no verdict."""
        if self.unit == "tokens" or (len(self.ratios) == 1 and self.unit != "MB"):
            return ""
        if self.unit == "MB" and self.ratio is not None and abs(self.ratio - 1) < MEMORY_NOISE:
            return "even"
        if self.spread is not None:
            return "ahead" if self.spread[0] > 1 else "behind" if self.spread[1] < 1 else "even"
        ours, theirs = self.middle(OURS), self.middle(THEIRS)
        if ours is None or theirs is None or self.unit != "%":
            return ""
        better = (ours - theirs) * (1 if self.more_is_better else -1)
        return "even" if abs(better) < 0.005 else "ahead" if better > 0 else "behind"

    def as_json(self) -> dict[str, Any]:
        return {
            "work": self.work,
            "figure": self.name,
            "unit": self.unit,
            "ours": self.found[OURS],
            "theirs": self.found[THEIRS],
            "ratio": self.ratio,
            "spread": self.spread,
            "verdict": self.verdict,
        }


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a server has no figures of a work, or not all: `not supported`, `died` or `failed`."""

    server: str
    work: str
    kind: str
    why: str

    def __str__(self) -> str:
        return f"{self.server}, {self.work}: {self.kind}: {self.why}"


@dataclass
class Match:
    """All that was found of ingot and one peer."""

    peer: str
    figures: list[Figure] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)

    def figure(self, work: str, name: str) -> Figure:
        known = next((each for each in self.figures if (each.work, each.name) == (work, name)), None)
        if known is None:
            known = Figure(work, name)
            self.figures.append(known)
        return known

    def count(self, verdict: str) -> int:
        return sum(figure.verdict == verdict for figure in self.figures)


def do_work(servers: tuple[Server, Server], work: Work, load: Load, match: Match) -> None:
    """Have both do it, by turns. Nothing that a server does raises anything: it is told in `match`."""
    under_way: list[Iterator[Figures] | None] = [work.run(server, load) for server in servers]
    step = 0
    while any(under_way):
        # Who goes first changes with each step.
        for side in SIDES if step % 2 == 0 else SIDES[::-1]:
            steps = under_way[side]
            if steps is not None and not _do_step(servers[side], side, steps, work.name, step, match):
                under_way[side] = None
        step += 1
    for server in servers:
        _revive(server, work.name, match)


def _do_step(server: Server, side: int, steps: Iterator[Figures], work: str, step: int, match: Match) -> bool:
    """Whether there may be another one."""
    try:
        found = next(steps)
    except StopIteration:
        return False
    except NotSupported as error:
        match.troubles.append(Trouble(server.name, work, "not supported", str(error)))
        return False
    except ServerError as error:
        why, kind = error.message, "failed"
        if (end := server.dead_soon()) is not None:
            kind, why = "died", f"{end}, after: {why}"
        match.troubles.append(Trouble(server.name, work, kind, _one_line(why)))
        return False
    except ODD_ANSWERS as error:
        match.troubles.append(Trouble(server.name, work, "failed", f"an odd answer: {type(error).__name__}: {error}"))
        return False
    for name, value in found.items():
        if value is not None:
            match.figure(work, name).found[side][step] = value
    return True


def _revive(server: Server, work: str, match: Match) -> None:
    """Start a server again that this work ended, for the next one."""
    if server.dead is None and server.running:
        return
    try:
        server.stop()
        server.start()
    except ServerError as error:
        match.troubles.append(Trouble(server.name, work, "died", f"no new start: {_one_line(error.message)}"))


def _one_line(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 300 else f"{words[:120]} ... {words[-170:]}"


def wins(matches: Sequence[Match]) -> str:
    """The outcome in a sentence for each peer."""
    return "; ".join(
        f"against {match.peer}, ingot is ahead in {match.count('ahead')} figures, behind in {match.count('behind')}, "
        f"even in {match.count('even')}"
        for match in matches
    )
