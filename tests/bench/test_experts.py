"""The benchmark of experts that do not fit in memory, on experts that hardly weigh anything."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import experts
from bench.experts import MIXTURE, TINY, Disk, Figures, Padded, Side, complain, main, texts_for

# isort: split
import mlx.core as mx


@pytest.fixture(autouse=True)
def on_a_cpu() -> None:
    if mx.default_device() != mx.cpu:
        pytest.skip("on a real GPU its full form is a benchmark")


def test_all_ways_give_the_same_tokens_and_figures_are_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--streams", "1,2", "--prompt", "4", "--output", "2", "--prefill", "8", "--rounds", "1", "--shares", "50"]
    asked = ["--tiny", "--shape", "mixture", "--disk-gbps", "4", "--json", str(tmp_path / "found"), *few]
    assert main([*asked, "--folder", str(tmp_path)]) == 0
    assert list((tmp_path / "mixture-tiny").glob("model-experts-*.safetensors"))  # for another run
    found = [Figures(**each) for each in json.loads((tmp_path / "found").read_text())]
    assert [each.work for each in found] == ["1 stream", "2 streams", "prefill"]
    assert all(each.same and 0 < each.slots < 64 for each in found)
    assert all(each.hits + each.guessed + each.missed == pytest.approx(1) for each in found)
    assert "reads slowed down to 4 GB/s" in capsys.readouterr().out


def test_padding_changes_nothing_of_what_the_mixture_says(tmp_path: Path) -> None:
    Padded(TINY["wide"]).write(tmp_path)
    tokens = next(texts_for(MIXTURE))[:24]
    (plain,), (padded,) = (Side(folder, None, Disk(None)).prefill([tokens]).answers for folder in (MIXTURE, tmp_path))
    assert padded == plain


def test_reads_are_slowed_down_to_the_speed_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 100.0, list[float]()
    monkeypatch.setattr(experts.time, "monotonic", lambda: now)
    monkeypatch.setattr(experts.time, "sleep", slept.append)
    (tmp_path / "file").write_bytes(bytes(1000))
    with (tmp_path / "file").open("rb") as file:
        disk, into = Disk(1e-6), memoryview(bytearray(500))
        assert [disk.read(file.fileno(), [into], offset) for offset in (0, 500)] == [500, 500]
    assert slept == pytest.approx([0.5, 1.0])  # one behind the other


def test_what_was_missed_is_said_and_other_tokens_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    good = Figures("wide", 1.0, 0.5, 32, "1 stream", 10.0, 0.9, 2.5, 0.9, 0.5, 0.3, 0.2, 1.0, 0.0, 7.0, 0.1, True)
    assert complain([good]) == 0 and capsys.readouterr().out == ""
    assert complain([replace(good, of_limit=0.5, over_waiting=1.2)]) == 0
    said = capsys.readouterr().out
    assert "0.50 of the limit, not 0.8" in said and "1.20x reading without overlap, not 2.0x" in said
    assert complain([replace(good, same=False)]) == 1
