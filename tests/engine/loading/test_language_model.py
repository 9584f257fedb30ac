"""Adapters that a server begins with."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.config import Settings
from ingot.engine.start_loras import begin_loras
from ingot.errors import AdapterError, ConfigError, ModelError
from ingot.kernels.device import current
from ingot.models.adapter import Adapter, adapt
from tests import tiny
from tests.equality.test_adapters import written


@pytest.fixture
def model() -> Adapter:
    return adapt(tiny.build("llama"), tiny.CONFIGS["llama"], current())


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return written(tmp_path, "llama")


def test_without_any_nothing_is_set_aside(model: Adapter) -> None:
    assert begin_loras(Settings(), model, "base") == (None, 0)


def test_those_that_are_named_are_loaded_and_counted(model: Adapter, folders: dict[str, Path]) -> None:
    settings = Settings(lora_modules=(f"sql={folders['one']}",), adapter_path=folders["two"])
    loras, taken = begin_loras(settings, model, "base")
    assert loras is not None and [*loras.named] == ["sql", "two"]
    assert taken == loras.nbytes == model.loras.nbytes > 0


def test_where_more_may_come_memory_is_set_aside_for_all(model: Adapter, folders: dict[str, Path]) -> None:
    settings = Settings(allow_runtime_lora_updating=True, max_loras=2, max_lora_rank=5)
    loras, taken = begin_loras(settings, model, "base")
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


def test_what_cannot_be_served_is_said_by_name(model: Adapter, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="The adapter sql cannot be served: There is no adapter_config"):
        begin_loras(Settings(lora_modules=(f"sql={tmp_path / 'nowhere'}",)), model, "base")
    with pytest.raises(ConfigError, match="its name is a model's"):
        begin_loras(Settings(lora_modules=(f"base={folders['one']}",)), model, "base")
    stated = f'{{"name": "sql", "path": "{folders["one"]}", "base_model_name": "other"}}'
    with pytest.raises(ConfigError, match="there is no model 'other'"):
        begin_loras(Settings(lora_modules=(stated,)), model, "base")


def test_the_same_files_under_two_names_are_one_adapter(model: Adapter, folders: dict[str, Path]) -> None:
    named = tuple(f"{name}={folders['one']}" for name in ("a", "b"))
    loras, taken = begin_loras(Settings(lora_modules=named), model, "base")
    assert loras is not None and loras.named["a"].digest == loras.named["b"].digest
    loras.unload("a")
    loras.drop_unused([])
    assert loras.nbytes == taken, "the other name still has it"
    loras.unload("b")
    loras.drop_unused([])
    assert loras.nbytes == 0
