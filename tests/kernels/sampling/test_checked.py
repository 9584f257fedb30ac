"""What is compared at load, and what is not used."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import pytest

from ingot.kernels import sampling
from ingot.kernels.device import Device
from ingot.kernels.drawing.kernels import draw
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.launchers import Launcher
from ingot.kernels.gpu.texts import Kernel, KernelText, Work
from ingot.kernels.sampling import checked_drawing, selfcheck
from tests.kernels.paged_attention.memory import emulated


class Broken(Emulator):
    def __init__(self, old: str, new: str) -> None:
        super().__init__()
        self._old, self._new = old, new

    def rewritten(self, text: KernelText) -> KernelText:
        assert self._old in text.body
        return text._replace(body=text.body.replace(self._old, self._new))


class Otherwise:
    """A launcher that is no emulator."""

    def __init__(self, run: Launcher) -> None:
        self._run = run

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: Work) -> list[mx.array]:
        return self._run(kernel, inputs, work)


@emulated
def test_draws_that_are_right_pass() -> None:
    assert selfcheck(partial(draw, Emulator())) is None


@emulated
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("score > most", "score < most", "draws wrongly by (0.0, 0, 1.0, 0.0, 0.5)"),
        (
            "before + of_lanes[lanes] <= goal",
            "before + of_lanes[lanes] < goal / 2",
            "draws wrongly by (0.7, 0, 1.0, 0.0,",
        ),
        (
            "least = edge > least ? edge : least",
            "least = edge < least ? edge : least",
            "draws wrongly by (0.7, 40, 1.0",
        ),
        ("goal = share_of(whole,", "goal = whole - share_of(whole,", "draws wrongly by (0.7, 0, 0.9"),
        ("likeliest = vocab;", "likeliest = vocabulary;", "does not run: a kernel does not compile"),
    ],
)
def test_a_kernel_that_is_wrong_is_named(old: str, new: str, said: str) -> None:
    wrong = selfcheck(partial(draw, Broken(old, new)))
    assert wrong is not None and wrong.startswith(said)


@emulated
def test_only_what_is_right_is_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sampling, "launcher", lambda device: Otherwise(Emulator()))
    assert checked_drawing(Device("cuda", "a GPU that draws rightly", 1)) is not None and not caplog.records
    monkeypatch.setattr(sampling, "launcher", lambda device: Otherwise(Broken("score > most", "score < most")))
    assert checked_drawing(Device("cuda", "a GPU that draws wrongly", 1)) is None
    assert "drawn by plain operations, slower: a kernel draws wrongly" in caplog.text


def test_others_have_no_kernel() -> None:
    for device in (Device("metal", "a Mac", 1), Device("cpu", "a CPU", 1), Device("cuda", "an emulated GPU", 1)):
        assert checked_drawing(device) is None or mx.default_device() != mx.cpu
