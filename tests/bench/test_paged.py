"""The benchmark of attention over pages, where the emulator runs it."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from bench.paged import WAYS, main
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


@pytest.mark.skipif(
    mx.default_device() != mx.cpu or not Emulator.available(), reason="the emulator needs a CPU and g++"
)
def test_each_way_to_cut_for_matrix_units_is_measured_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INGOT_AS", "cuda")
    monkeypatch.setattr("bench.paged.SHORT", [5, 70])
    file = tmp_path / "figures.json"
    given = "--matrix --rows 2 --lengths 90 --shapes 2/1x32 --repeats 1 --widths 1,3"
    main([*given.split(), "--json", str(file)])
    figures = json.loads(file.read_text())
    assert [figure["name"] for figure in figures] == [*WAYS] * 8, (
        "two widths each of two rows, one, a shorter one and short ones"
    )
    assert all(figure["same"] for figure in figures), "a query's bits depend on nobody beside it"
    assert all(figure["ratio"] == 1.0 for figure in figures if figure["width"] == 1)
    printed = capsys.readouterr().out.splitlines()[1:]
    assert len(printed) == len(figures) and all("TB/s" in line and "right to" in line for line in printed)


def test_matrix_units_are_cut_in_ways_of_their_own() -> None:
    with pytest.raises(SystemExit):
        main(["--matrix", "--split", "256"])


def test_a_cpu_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INGOT_AS", raising=False)
    if mx.default_device() == mx.cpu:
        with pytest.raises(SystemExit, match="set INGOT_AS"):
            main(["--rows", "1", "--lengths", "64", "--shapes", "1/1x16"])
