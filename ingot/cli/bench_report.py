"""A benchmark's figures as a table, as JSON and as a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ingot.cli.bench import LoadPlan, Target
from ingot.cli.bench_stats import Level, Spread
from ingot.errors import ConfigError
from ingot.extras import require
from ingot.version import __version__

HEAD = ("streams", "done", "failed", "prompt", "output", "tok/s", "tok/s each")
PLOTS = (".png", ".svg", ".pdf")
SPREADS = ("TTFT p50", "p90", "p99 ms", "ITL p50", "p90", "p99 ms")


def table_head() -> str:
    return _row([*HEAD, *SPREADS])


def table_row(level: Level) -> str:
    good = level.requests - level.failed
    each = level.request_tokens_per_second
    cells = [
        str(level.concurrency),
        str(good),
        str(level.failed),
        f"{level.prompt_tokens / good:.0f}" if good else "-",
        f"{level.output_tokens / good:.0f}" if good else "-",
        f"{level.output_tokens_per_second:.1f}",
        f"{each.mean:.1f}" if each else "-",
    ]
    return _row([*cells, *_milliseconds(level.ttft), *_milliseconds(level.inter_token)])


def _milliseconds(spread: Spread | None) -> list[str]:
    return ["-"] * 3 if spread is None else [f"{value * 1e3:.1f}" for value in (spread.p50, spread.p90, spread.p99)]


def _row(cells: Sequence[str]) -> str:
    return "  ".join(f"{cell:>{max(7, len(head))}}" for cell, head in zip(cells, (*HEAD, *SPREADS), strict=True))


def as_json(target: Target, plan: LoadPlan, levels: Sequence[Level]) -> dict[str, Any]:
    """Times are in seconds."""
    server = {"url": target.client.url, "model": target.model, "is_ingot": target.is_ingot}
    return {
        "ingot": __version__,
        "server": server,
        "plan": asdict(plan) | {"words_per_prompt": target.words},
        "levels": [asdict(level) | {"failed": level.failed} for level in levels],
    }


def write_json(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def require_plot(path: Path) -> None:
    """Raise before anything is measured, rather than after, when no plot can be drawn."""
    if path.suffix not in PLOTS:
        raise ConfigError(f"--plot: {path} must end in {', '.join(PLOTS)}")
    require("bench", "--plot")


def write_plot(path: Path, target: Target, plan: LoadPlan, levels: Sequence[Level]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    streams = [level.concurrency for level in levels]
    left.plot(streams, [level.output_tokens_per_second for level in levels], marker="o")
    left.set(title="throughput", ylabel="output tokens per second")
    _plot_spread(middle, "time to first token", [(level.concurrency, level.ttft) for level in levels])
    _plot_spread(right, "time between tokens", [(level.concurrency, level.inter_token) for level in levels])
    for axes in (left, middle, right):
        axes.set(xlabel="streams at once", xticks=streams)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.suptitle(f"{target.model}, {plan.prompt_tokens} tokens in, {plan.output_tokens} out, {plan.endpoint}")
    figure.savefig(path, dpi=130)


def _plot_spread(axes: Any, title: str, points: Sequence[tuple[int, Spread | None]]) -> None:
    measured = [(streams, spread) for streams, spread in points if spread is not None]
    for name in ("p50", "p90", "p99"):
        values = [asdict(spread)[name] * 1e3 for _, spread in measured]
        axes.plot([streams for streams, _ in measured], values, marker="o", label=name)
    axes.set(title=title, ylabel="milliseconds")
    axes.legend()
