"""Draws in one launch, against float64 by the definition of each filter."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.kernels import sampling
from ingot.kernels.device import Device
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import Kernel, KernelText, LaunchConfig
from ingot.kernels.gpu.launcher import Launcher
from ingot.kernels.sampling import check_sampling, checked_sampling, sample_tokens
from tests.kernels.cpu.test_draw import FILTERS, SPREADS, check_draws, kept
from tests.kernels.paged_attention.memory import emulated

only_sampling = emulated


@only_sampling
@given(vocab=st.integers(1, 3000), spread=SPREADS, filters=FILTERS, seed=st.integers(0, 1000))
def test_a_token_lies_where_the_running_sum_of_what_is_kept_passes_the_draw(
    vocab: int, spread: float, filters: Any, seed: int
) -> None:
    check_draws(partial(sample_tokens, Emulator(seed)), (3, vocab), spread, filters, seed)


@only_sampling
def test_without_a_temperature_the_first_of_the_likeliest_is_taken() -> None:
    logits = np.random.default_rng(1).standard_normal((4, 3333)).astype(np.float32)
    logits[1, [7, 300, 3000]] = 9
    logits[2] = -np.inf
    logits[2, 3332] = -5
    logits[3] = -np.inf
    drawn = sample_tokens(Emulator(), mx.array(logits), [(0.0, 0, 1.0, 0.0, 0.9)] * 4)
    assert drawn.tolist() == [int(logits[0].argmax()), 7, 3332, 0]


@only_sampling
def test_weights_that_are_alike_are_kept_or_dropped_together() -> None:
    logits = np.zeros((1, 2000), np.float32)
    logits[0, :1000] = 1.0
    for at in (0.0, 0.25, 0.9999):
        [token] = sample_tokens(Emulator(), mx.array(logits), [(1.0, 7, 1.0, 0.0, at)]).tolist()  # type: ignore[misc]
        assert token == int(at * 1000), "all thousand that weigh as much as the seventh"


@only_sampling
def test_what_may_not_be_drawn_is_not() -> None:
    logits = np.full((1, 5000), -np.inf, np.float32)
    logits[0, [17, 4999]] = [0.0, -1.0]
    found = {
        at: sample_tokens(Emulator(), mx.array(logits), [(1.0, 0, 0.99, 0.0, at)]).item()
        for at in (0.0, 0.7, 0.8, 0.999999)
    }
    assert found == {0.0: 17, 0.7: 17, 0.8: 4999, 0.999999: 4999}


@only_sampling
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_threads_may_run_in_any_order(seed: int) -> None:
    logits = mx.random.normal((2, 2500), key=mx.random.key(seed))
    draws = [(0.8, 50, 0.9, 0.0, 0.3), (1.5, 0, 0.95, 0.01, 0.77)]
    assert sample_tokens(Emulator(seed), logits, draws).tolist() == sample_tokens(Emulator(), logits, draws).tolist()


@only_sampling
def test_a_large_vocabulary_is_drawn_from() -> None:
    dice = np.random.default_rng(5)
    logits = (3 * dice.standard_normal((1, 50_257))).astype(np.float32)
    [token] = sample_tokens(Emulator(), mx.array(logits), [(1.0, 0, 0.9, 0.0, 0.4)]).tolist()  # type: ignore[misc]
    shares = kept(logits[0], 1.0, 0, 0.9, 0.0)
    running = np.cumsum(shares)
    assert running[token] - shares[token] - 1e-5 <= 0.4 <= running[token] + 1e-5


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

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
        return self._run(kernel, inputs, work)


@emulated
def test_draws_that_are_right_pass() -> None:
    assert check_sampling(partial(sample_tokens, Emulator())) is None


@emulated
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("score > most", "score < most", "samples wrongly by (0.0, 0, 1.0, 0.0, 0.5)"),
        (
            "before + of_lanes[lanes] <= goal",
            "before + of_lanes[lanes] < goal / 2",
            "samples wrongly by (0.7, 0, 1.0, 0.0,",
        ),
        (
            "least = edge > least ? edge : least",
            "least = edge < least ? edge : least",
            "samples wrongly by (0.7, 40, 1.0",
        ),
        ("goal = share_of(whole,", "goal = whole - share_of(whole,", "samples wrongly by (0.7, 0, 0.9"),
        ("likeliest = vocab;", "likeliest = vocabulary;", "does not run: a kernel does not compile"),
    ],
)
def test_a_kernel_that_is_wrong_is_named(old: str, new: str, said: str) -> None:
    wrong = check_sampling(partial(sample_tokens, Broken(old, new)))
    assert wrong is not None and wrong.startswith(said)


@emulated
def test_only_what_is_right_is_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sampling, "kernel_launcher", lambda device: Otherwise(Emulator()))
    assert checked_sampling(Device("cuda", "a GPU that samples rightly", 1)) is not None and not caplog.records
    monkeypatch.setattr(sampling, "kernel_launcher", lambda device: Otherwise(Broken("score > most", "score < most")))
    assert checked_sampling(Device("cuda", "a GPU that samples wrongly", 1)) is None
    assert "sampled by plain operations, which is slower: the kernel samples wrongly" in caplog.text


def test_others_have_no_kernel() -> None:
    for device in (Device("metal", "a Mac", 1), Device("cpu", "a CPU", 1), Device("cuda", "an emulated GPU", 1)):
        assert checked_sampling(device) is None or mx.default_device() != mx.cpu
