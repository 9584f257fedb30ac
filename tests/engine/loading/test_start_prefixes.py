"""What a model's attention cannot bear is refused before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ingot.config import Settings
from ingot.engine.start_prefixes import prefix_codec
from ingot.errors import ConfigError
from tests import tiny
from tests.models.layers import family_configs


def adapter_of(model: Any) -> Any:
    return replace(tiny.adapter("llama", 32, exact=True), model=model)


def test_a_model_with_sinks_keeps_its_states_as_they_are() -> None:
    adapter = adapter_of(family_configs.build("gpt_oss"))
    assert not prefix_codec(Settings(), adapter).lossy
    with pytest.raises(ConfigError, match="cache_codec turbo4 cannot be used: this model's attention has sinks"):
        prefix_codec(Settings(cache_codec="turbo4"), adapter)


def test_other_models_take_what_is_asked_for() -> None:
    assert str(prefix_codec(Settings(cache_codec="k8v4"), adapter_of(family_configs.build("qwen3"))).name) == "k8v4"
