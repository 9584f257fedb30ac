"""What was measured, as the process that measures says it: a line of JSON each. Imports no mlx."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from ingot.kernels.measured import mean_ratio

LINE: Final = "ingot-measure: "
"""Begins a line that is one of ours: a library may say something, too."""
LEAST_TURNS: Final = 3
Section = Literal["kernels", "model"]


@dataclass(frozen=True)
class Figure:
    """One thing of ours in one case, beside MLX's own."""

    name: str
    section: Section
    part: str | None = None  # what is left out where it is slower; None: nothing can be, or it is judged with others
    right: bool | None = None  # None: it was not compared
    wrong: str | None = None  # what its check found
    off: float | None = None  # the largest difference from MLX's result, as a share of the largest number
    ours: float | None = None
    mlx: float | None = None
    unit: Literal["us", "tokens/s"] = "us"
    ratio: float | None = None  # how many times MLX's time ours takes, the median of several turns
    turns: int = 0  # of which the figures are medians
    note: str | None = None  # why something is not there


class Said:
    """The lines of the process that measures, put together."""

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}
        self.figures: dict[str, Figure] = {}
        self.current: str | None = None
        self._planned: dict[str, None] = {}

    def hear(self, line: str) -> Figure | None:
        """Take in a line of output; returns the figure that it has."""
        if not line.startswith(LINE):
            return None
        said = json.loads(line.removeprefix(LINE))
        self.about |= said.get("about", {})
        self._planned |= dict.fromkeys(said.get("planned", ()))
        self.current = said.get("begun", self.current)
        if "figure" not in said:
            return None
        figure = Figure(**said["figure"])
        self.figures[figure.name] = figure
        self.current = None
        return figure

    @property
    def unmeasured(self) -> list[str]:
        """What was planned, and there was no time for."""
        return [name for name in self._planned if name not in self.figures]


def line_of(**said: Any) -> str:
    """What `Said.hear` takes: `about`, `planned` names, the name of what is `begun`, or a `figure`."""
    figure = said.get("figure")
    return LINE + json.dumps(said if figure is None else {**said, "figure": asdict(figure)})


def ratios_by_part(figures: Iterable[Figure]) -> Mapping[str, float]:
    """Of each part that was measured and right, over all its cases that had turns enough: one or two may have been
    disturbed."""
    found: dict[str, list[float]] = {}
    for figure in figures:
        enough = figure.ratio is not None and figure.turns >= LEAST_TURNS
        if enough and figure.part is not None and figure.ratio is not None and figure.right is not False:
            found.setdefault(figure.part, []).append(figure.ratio)
    return {part: mean_ratio(ratios) for part, ratios in found.items()}
