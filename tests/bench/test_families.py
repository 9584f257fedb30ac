"""The benchmark of families against mlx-lm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.families import main
from bench.family_shapes import random_model


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


def test_gpt_oss_is_quantised_as_its_checkpoints_are() -> None:
    modes = {(path.split(".")[-1], each.mode, each.bits) for path, each in _packed_layers("gpt-oss")}
    assert {("gate_proj", "mxfp4", 4), ("down_proj", "mxfp4", 4), ("router", "affine", 8)} <= modes
    assert {("q_proj", "affine", 8), ("embed_tokens", "affine", 8), ("lm_head", "affine", 8)} <= modes
    assert {each.mode for _, each in _packed_layers("qwen3-moe")} == {"affine"}


def _packed_layers(family: str) -> list[tuple[str, Any]]:
    model = random_model(family)[1]
    return [(path, each) for path, each in model.named_modules() if "scales" in each]


def test_an_unknown_family_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--families", "llama,novel"])
    assert "there is no family novel" in capsys.readouterr().err
