from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from ingot.cli import bench_report
from ingot.cli.bench import LoadPlan, Target
from ingot.cli.bench_stats import Sample, summarise
from ingot.cli.client import Client
from ingot.errors import ConfigError

TARGET = Target(Client("http://127.0.0.1:1"), "m", is_ingot=False, words=9)
GOOD = summarise(1, [Sample(0.0, 2.0, arrivals=(0.5, 1.0, 2.0), prompt_tokens=7, completion_tokens=3)])
BAD = summarise(4, [Sample(0.0, 1.0, error="no")])


def test_a_row_of_the_table_holds_milliseconds_and_rates() -> None:
    cells = bench_report.table_row(GOOD).split()
    assert cells == ["1", "1", "0", "7", "3", "1.5", "1.5", "500.0", "500.0", "500.0", "750.0", "950.0", "995.0"]


def test_a_level_that_failed_altogether_shows_dashes() -> None:
    assert bench_report.table_row(BAD).split() == ["4", "0", "1", "-", "-", "0.0", *["-"] * 7]


def test_rows_line_up_with_the_head() -> None:
    assert len(bench_report.table_head()) == len(bench_report.table_row(GOOD))


def test_the_json_holds_every_figure(tmp_path: Path) -> None:
    bench_report.write_json(tmp_path / "x.json", bench_report.as_json(TARGET, LoadPlan(), [GOOD, BAD]))
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["server"] == {"url": "http://127.0.0.1:1", "model": "m", "is_ingot": False}
    assert written["levels"][0]["inter_token"]["p50"] == 0.75
    assert written["levels"][1] | {"ttft": None, "failed": 1, "errors": {"no": 1}} == written["levels"][1]


def test_a_plot_is_drawn_also_where_a_level_failed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench_report.write_plot(tmp_path / "x.svg", TARGET, LoadPlan(), [GOOD, BAD])
    assert "<svg" in (tmp_path / "x.svg").read_text()


def test_a_plot_without_matplotlib_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        bench_report.require_plot(Path("x.png"))


def test_a_plot_in_an_unknown_format_is_refused_beforehand() -> None:
    with pytest.raises(ConfigError, match=r"must end in \.png, \.svg, \.pdf"):
        bench_report.require_plot(Path("x.bmp"))
