"""The benchmark of products with packed weights, where the emulator runs it."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest

from bench.packed import FLOATS, SECTIONS, main
from ingot.kernels.gpu.emulator import Emulator


@pytest.mark.skipif(
    mx.default_device() != mx.cpu or not Emulator.available(), reason="the emulator needs a CPU and g++"
)
def test_all_of_it_runs_and_is_right(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("INGOT_AS", "cuda")
    main(["--tiny", "--rows", "1,9"])
    said = capsys.readouterr().out
    assert [name for name in SECTIONS if f"\n{name}: " in said] == [*SECTIONS] and "WRONG" not in said
    offs = [float(off) for off in re.findall(r"\| (0\.\d{4})$", said, re.MULTILINE)]
    assert len(offs) == 4 and max(offs) < 0.05, "two numbers of rows, and experts for two numbers of tokens"


@pytest.mark.skipif(
    mx.default_device() != mx.cpu or not Emulator.available(), reason="the emulator needs a CPU and g++"
)
@pytest.mark.parametrize("mode", FLOATS)
def test_floats_are_measured_too(
    mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INGOT_AS", "cuda")
    main(["--tiny", "--rows", "3", "--only", "products", "--mode", mode])
    [off] = re.findall(r"\| (0\.\d{4})$", capsys.readouterr().out, re.MULTILINE)
    assert float(off) < 0.01


def test_a_cpu_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INGOT_AS", raising=False)
    if mx.default_device() == mx.cpu:
        with pytest.raises(SystemExit, match="set INGOT_AS=cuda"):
            main(["--tiny"])
