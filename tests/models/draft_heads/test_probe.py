"""A head that guesses nearly nothing is refused when it is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from ingot.errors import ModelError
from ingot.kernels.device import Device, current
from ingot.models.adapter import load
from ingot.models.draft_heads.checkpoint import find_head
from ingot.models.draft_heads.mtp import load_head
from ingot.models.heads.probe import MOST_ASKED, break_even, check_head
from tests.engines import GPU
from tests.models.draft_heads.making import Tensors
from tests.models.draft_heads.test_hybrid import HYBRID


def noisy(tensors: Tensors, much: float) -> Tensors:
    """With noise so many times as large as weights are, as rounding to few bits leaves it."""
    mx.random.seed(0)
    return {
        name: array + much * mx.std(array) * mx.random.normal(array.shape, array.dtype) if array.ndim > 1 else array
        for name, array in tensors.items()
    }


def drowned(tensors: Tensors) -> Tensors:
    return noisy(tensors, 4.0)


def blurred(tensors: Tensors) -> Tensors:
    """It guesses a tenth, which is more than nothing and too little to pay."""
    return noisy(tensors, 1.0)


def mistaken(tensors: Tensors) -> Tensors:
    """The hidden state where the embedding belongs."""
    embedded, hidden = mx.split(tensors["mtp.fc.weight"], 2, axis=1)
    return {**tensors, "mtp.fc.weight": mx.concatenate([hidden, embedded], axis=1)}


def checked(folder: Path, device: Device | None = None) -> float:
    adapter = load(folder, device or current())
    source = find_head(folder, adapter.config)
    assert source is not None
    return check_head(load_head(source, adapter), adapter)


@pytest.mark.parametrize(
    "device", [pytest.param(None, id="here"), pytest.param(GPU, id="as-on-a-gpu", marks=pytest.mark.slow)]
)
def test_a_trained_head_guesses_much_of_what_its_model_writes(device: Device | None) -> None:
    assert checked(HYBRID, device) > 0.4


@pytest.mark.parametrize("changed", [drowned, blurred, mistaken])
def test_a_head_that_guesses_next_to_nothing_is_refused_with_the_reason(
    changed: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    folder = tmp_path / "hybrid"
    shutil.copytree(HYBRID, folder)
    stored = mx.load(str(HYBRID / "model.safetensors"))
    assert isinstance(stored, dict)
    head = {name: array for name, array in stored.items() if name.startswith("mtp.")}
    mx.save_safetensors(str(folder / "mtp.safetensors"), changed(head))
    with pytest.raises(ModelError, match=r"guesses 1?\d% of 48 tokens .* below \d\d% .* made from packed weights"):
        checked(folder)


def test_what_is_asked_of_a_head_is_what_reading_it_and_verifying_cost_at_the_best_of_cases() -> None:
    assert 0.06 < break_even(849, 54_000) < 0.07  # a bfloat16 head and model of 27B
    assert 0.10 < break_even(849, 14_000) < 0.12  # the same head beside weights of four bits
    assert break_even(1, 1) == MOST_ASKED
