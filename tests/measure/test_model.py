from __future__ import annotations

import json
import math
import time
from pathlib import Path

import mlx.core as mx
import pytest

from ingot.kernels.cpu import native
from ingot.kernels.device import Device, current_device
from ingot.kernels.gpu.emulator import Emulator
from ingot.measure import model
from ingot.measure.figures import Figure
from ingot.models.layers.modules import named_parameters
from tests import tiny
from tests.engines import GPU

METAL = Device("metal", "a Mac", 1 << 34)


def written(kind: str, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(tiny.CONFIGS[kind]))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(named_parameters(tiny.build(kind))))
    return folder


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "PROMPT", 24)
    monkeypatch.setattr(model, "MOST_TOKENS", 3)
    monkeypatch.setattr(model, "MOST_TURNS", 3)


def figures(kind: str, folder: Path, device: Device, seconds: float = math.inf) -> dict[str, Figure]:
    deadline = time.monotonic() + min(seconds, 600)
    found = [*model.model_figures(str(written(kind, folder)), device, deadline, lambda name: None)]
    return {figure.name: figure for figure in found}


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
def test_on_a_cpu_parts_layers_and_tokens_a_second_are_measured(tmp_path: Path) -> None:
    found = figures("llama", tmp_path, current_device())
    assert {*model.planned_names()} <= found.keys()
    for name in model.TOKENS_PER_SECOND:
        assert found[name].unit == "tokens/s" and found[name].ours and found[name].mlx and found[name].turns
    steps = found[model.STEPS]
    assert steps.note == "native layers as one operation" and "llama of" in str(steps.part) and steps.ratio
    parts = [figure for name, figure in found.items() if name.startswith(("attention (", "MLP ("))]
    assert len(parts) == 2 * 3, "with one token, with some, and with a prompt"
    assert all(figure.right and figure.ratio and figure.part is None for figure in parts), parts


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
def test_modules_that_are_not_one_operation_can_be_left_out_one_by_one(tmp_path: Path) -> None:
    found = figures("kernel-hybrid", tmp_path, current_device())
    parts = [figure for figure in found.values() if figure.unit == "us" and figure.ratio is not None]
    assert any("recurrent mixer" in figure.name for figure in parts)
    assert all(figure.right and figure.part is not None for figure in parts), parts
    assert "not one operation" in str(found[model.STEPS].note)


@pytest.mark.skipif(not Emulator.available(), reason="kernels are emulated with g++")
@pytest.mark.parametrize(("device", "how"), [(GPU, "decode graphs"), (METAL, None)], ids=["cuda", "metal"])
def test_on_a_gpu_parts_layers_and_tokens_a_second_are_measured(
    device: Device, how: str | None, tmp_path: Path
) -> None:
    found = figures("kernel-packed", tmp_path, device)
    assert {*model.planned_names()} <= found.keys()
    assert all("fails" not in str(figure.note) and figure.right is not False for figure in found.values()), found
    assert (found[model.STEPS].note == how) == (how is not None)
    assert any(name.startswith("attention (") for name in found)


def test_what_there_is_no_time_for_has_no_figure(tmp_path: Path) -> None:
    assert figures("llama", tmp_path, current_device(), seconds=0) == {}


def test_a_model_that_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    found = [*model.model_figures(str(tmp_path), current_device(), math.inf, lambda name: None)]
    assert {figure.name for figure in found} == {*model.planned_names()}
    assert all("cannot be loaded" in str(figure.note) for figure in found)


def test_a_model_that_does_not_fit_twice_is_measured_without_mlx_lms(tmp_path: Path) -> None:
    found = figures("llama", tmp_path, Device("cpu", "a small CPU", 1 << 10))
    decode = found["decode, 1 stream"]
    assert decode.ours and decode.mlx is None and decode.note == "the model does not fit in memory twice"
