"""The benchmark of the host's part of decode steps, where the emulator runs kernels."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from bench.family_shapes import FAMILIES
from bench.host import as_on_metal, main
from ingot.kernels.gpu.emulator import Emulator

pytestmark = pytest.mark.skipif(
    mx.default_device() != mx.cpu or not Emulator.available(), reason="the emulator needs a CPU and g++"
)


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_it_counts_and_times_both_sides(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--families", family, "--steps", "3", "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [each["rows"] for each in figures] == [1, 8]
    layers = FAMILIES[family]["num_hidden_layers"]
    for each in figures:
        ours, stock = each["ours"], each["stock"]
        assert 10 * layers < ours["operations"] < stock["operations"] < 60 * layers
        assert ours["microseconds"] > 0 and stock["microseconds"] > 0
    assert capsys.readouterr().out.count(f"| {family} |") == 2


def test_where_time_goes_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--families", "llama", "--rows", "1", "--steps", "2", "--profile"])
    said = capsys.readouterr().out
    assert "CustomKernel" in said and "_run_compiled" in said, "steps are compiled, as on a Mac"


def test_work_that_fails_is_not_hidden_and_leaves_nothing_behind() -> None:
    before = (mx.default_device, mx.fast.rms_norm, Emulator.__call__)

    def fails() -> None:
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        as_on_metal(fails)
    assert (mx.default_device, mx.fast.rms_norm, Emulator.__call__) == before
