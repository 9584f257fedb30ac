"""Lines in panels, drawn with matplotlib, which the `bench` extra installs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.extras import missing_packages

WIDTH, DPI = 12.0, 130


def available() -> bool:
    return not missing_packages("bench")


def panels(rows: int, columns: int, height: float = 3.6) -> tuple[Any, Any]:
    """A figure, and its axes by row and column. `height` is that of a row, in inches."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def draw(axes: Any, x: Sequence[float], lines: Mapping[str, Sequence[float]], marker: str = "") -> None:
    for label, values in lines.items():
        axes.plot(x, values, marker=marker, label=label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if lines:
        axes.legend()


def save(figure: Any, *paths: Path) -> None:
    """In the formats that their names end in."""
    for path in paths:
        figure.savefig(path, dpi=DPI)
