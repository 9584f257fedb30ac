"""The benchmark of attention over pages, where the emulator runs it."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from bench.paged import main
from ingot.kernels.gpu.emulator import Emulator


@pytest.mark.skipif(
    mx.default_device() != mx.cpu or not Emulator.available(), reason="the emulator needs a CPU and g++"
)
def test_both_ways_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_AS", "metal")
    file = tmp_path / "figures.json"
    main(
        [
            "--rows",
            "2",
            "--lengths",
            "90",
            "--shapes",
            "2/1x16",
            "--repeats",
            "1",
            "--widths",
            "1,3",
            "--json",
            str(file),
        ]
    )
    figures = json.loads(file.read_text())
    alike, ragged = figures[::2]
    assert [figure["width"] for figure in figures] == [1, 3, 1, 3]
    assert (alike["bytes"], ragged["bytes"]) == (180 * 64, 135 * 64)
    assert max(figure["off"] for figure in figures) < 0.02 and alike["paged"] > 0


def test_a_cpu_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INGOT_AS", raising=False)
    if mx.default_device() == mx.cpu:
        with pytest.raises(SystemExit, match="set INGOT_AS"):
            main(["--rows", "1", "--lengths", "64", "--shapes", "1/1x16"])
