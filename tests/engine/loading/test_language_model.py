"""Adapters that a server begins with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ingot.config import Settings
from ingot.engine.loading.language_model import VisionSupport, load_startup_loras, prefix_cache_codec
from ingot.errors import AdapterError, ConfigError, ModelError
from ingot.kernels.device import current_device
from ingot.media.layout import ImageLayoutOptions, Layout, Size
from ingot.models.adapter import ModelAdapter, adapt_model
from tests import tiny
from tests.equality.test_adapters import written
from tests.fake_tower import LAYOUT, SLICES, FakeTower
from tests.models.layers import family_configs


@pytest.fixture
def model() -> ModelAdapter:
    return adapt_model(tiny.build("llama"), tiny.CONFIGS["llama"], current_device())


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return written(tmp_path, "llama")


def test_without_any_nothing_is_set_aside(model: ModelAdapter) -> None:
    assert load_startup_loras(Settings(), model, "base") == (None, 0)


def test_those_that_are_named_are_loaded_and_counted(model: ModelAdapter, folders: dict[str, Path]) -> None:
    settings = Settings(lora_modules=(f"sql={folders['one']}",), adapter_path=folders["two"])
    loras, taken = load_startup_loras(settings, model, "base")
    assert loras is not None and [*loras.named] == ["sql", "two"]
    assert taken == loras.nbytes == model.loras.nbytes > 0


def test_where_more_may_come_memory_is_set_aside_for_all(model: ModelAdapter, folders: dict[str, Path]) -> None:
    settings = Settings(allow_runtime_lora_updating=True, max_loras=2, max_lora_rank=5)
    loras, taken = load_startup_loras(settings, model, "base")
    assert loras is not None and not loras.named and loras.nbytes == 0
    loras.load("one", folders["one"])
    loras.load("two", folders["two"])
    assert loras.nbytes <= taken == model.loras.most_bytes(2, 5)
    with pytest.raises(AdapterError, match="2 adapters already"):
        loras.load("more", folders["one"])
    loras.unload("two")
    loras.drop_unused([])
    with pytest.raises(AdapterError, match="rank is 6, more than the 5"):
        loras.load("three", folders["three"])


def test_what_cannot_be_served_is_said_by_name(model: ModelAdapter, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="The adapter sql cannot be served: There is no adapter_config"):
        load_startup_loras(Settings(lora_modules=(f"sql={tmp_path / 'nowhere'}",)), model, "base")
    with pytest.raises(ConfigError, match="its name is a model's"):
        load_startup_loras(Settings(lora_modules=(f"base={folders['one']}",)), model, "base")
    stated = f'{{"name": "sql", "path": "{folders["one"]}", "base_model_name": "other"}}'
    with pytest.raises(ConfigError, match="there is no model 'other'"):
        load_startup_loras(Settings(lora_modules=(stated,)), model, "base")


def test_the_same_files_under_two_names_are_one_adapter(model: ModelAdapter, folders: dict[str, Path]) -> None:
    named = tuple(f"{name}={folders['one']}" for name in ("a", "b"))
    loras, taken = load_startup_loras(Settings(lora_modules=named), model, "base")
    assert loras is not None and loras.named["a"].digest == loras.named["b"].digest
    loras.unload("a")
    loras.drop_unused([])
    assert loras.nbytes == taken, "the other name still has it"
    loras.unload("b")
    loras.drop_unused([])
    assert loras.nbytes == 0


class Squares:
    """A processor that shows everything alike, and no video."""

    placeholders: ClassVar[dict[str, str]] = {}

    def image_layout(self, size: Size, layout_options: ImageLayoutOptions) -> Layout:
        return LAYOUT


def test_a_tower_is_run_at_load_so_that_nothing_is_compiled_while_streams_run() -> None:
    tower = FakeTower()
    vision_encoder = VisionSupport(Squares(), with_vision=True).vision_encoder(tower, 1 << 20)  # type: ignore[arg-type]
    assert vision_encoder is not None and vision_encoder.tower is tower
    assert len(tower.sliced) == SLICES


def test_a_slow_tower_is_tried_for_seconds_not_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = FakeTower(slice_s=6.0)
    monkeypatch.setattr("ingot.models.vision.loading.time.process_time", lambda: tower.now)
    VisionSupport(Squares(), with_vision=True).vision_encoder(tower, 1 << 20)  # type: ignore[arg-type]
    assert len(tower.sliced) == 2


@pytest.mark.parametrize("family", ["phi4mm", "phi4_multimodal"])
def test_a_family_that_nothing_can_be_done_for_is_refused_by_name(family: str, tmp_path: Path) -> None:
    for settings in (Settings(), Settings(text_only=True)):
        with pytest.raises(ModelError, match="Phi 4 multimodal is not served"):
            VisionSupport.of(tmp_path, {"model_type": family}, settings)


def adapter_of(model: Any) -> Any:
    return replace(tiny.adapter("llama", 32, exact=True), model=model)


def test_a_model_with_sinks_keeps_its_states_as_they_are() -> None:
    adapter = adapter_of(family_configs.build("gpt_oss"))
    assert not prefix_cache_codec(Settings(), adapter).lossy
    with pytest.raises(ConfigError, match="cache_codec turbo4 cannot be used: this model's attention has sinks"):
        prefix_cache_codec(Settings(cache_codec="turbo4"), adapter)


def test_other_models_take_what_is_asked_for() -> None:
    assert (
        str(prefix_cache_codec(Settings(cache_codec="k8v4"), adapter_of(family_configs.build("qwen3"))).name) == "k8v4"
    )
