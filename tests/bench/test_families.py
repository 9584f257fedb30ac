"""The benchmark of families against mlx-lm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.families import main


def test_both_sides_of_a_family_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "families.json"
    code = main(["--families", "llama,lfm2", "--prompt", "8", "--output", "2", "--json", str(report)])
    said, figures = capsys.readouterr().out, json.loads(report.read_text())
    assert code == 0 and "prefill: " in said and "decode: " in said
    assert [*figures] == ["llama", "lfm2"]
    assert all(min(ratio) > 0 for ratio in (each["ratios"] for each in figures.values()))


def test_a_side_that_fails_costs_only_its_family(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.families.LIMIT_S", 0.01)
    assert main(["--families", "llama", "--prompt", "8"]) == 1
    assert "NOT MEASURED: ours took more than" in capsys.readouterr().out


def test_an_unknown_family_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--families", "llama,novel"])
    assert "there is no family novel" in capsys.readouterr().err
