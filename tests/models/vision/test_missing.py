"""Without the extra `vision`, models that see say what to install, and are served for text alone when asked."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import pytest

from bench.random_models import write_tokenizer
from ingot.config import Settings
from ingot.engine.loading.language_model import start_engine
from ingot.errors import ModelError
from ingot.kernels.device import current_device
from ingot.models.memory_needs import memory_needs
from tests.models.vision.looking import VOCAB, saved

SETTINGS = Settings(memory="1GB", cache_dir=None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A vision model, where mlx-vlm is missing."""
    made = saved("qwen3_vl", tmp_path / "model")
    write_tokenizer(made, VOCAB)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_vlm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    return made


def test_what_to_install_is_said(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"extras add vision`, or serve it for text alone with --text-only"):
        start_engine(SETTINGS, folder, name="blind", source="random weights")


def test_text_is_served_without_it(folder: Path) -> None:
    settings = Settings(memory="1GB", cache_dir=None, text_only=True)
    engine = start_engine(settings, folder, name="blind", source="random weights")
    engine.close()
    assert engine.card.sees == ()


def test_memory_is_told_of_what_can_be_served(folder: Path) -> None:
    found = memory_needs(folder, current_device())
    assert found is not None and found.tower == 0


def test_a_conversion_of_the_language_model_alone_is_served_for_text(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = mx.load(str(file))
    assert isinstance(weights, dict)
    blind = {name: weight for name, weight in weights.items() if "vision" not in name}
    mx.eval(blind)
    mx.save_safetensors(str(file), blind, metadata={"format": "mlx"})
    engine = start_engine(SETTINGS, folder, name="blind", source="random weights")
    engine.close()
    assert engine.card.sees == ()
    assert any("no weights of its vision tower" in note for note in engine.card.notes)
