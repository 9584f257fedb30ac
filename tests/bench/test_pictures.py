"""Streams beside pictures: what is asked for fits the model, and gaps are those of the time that is meant."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench.pictures import FOUNDRY, gaps, showing
from bench.seeing_models import TOWERS, config_of
from ingot.media.image_processors import read_processor
from ingot.upstream import load_config


def test_sixteen_pictures_fit_the_context_of_the_foundrys_model() -> None:
    if not (FOUNDRY / "model.safetensors").exists():
        pytest.skip("the foundry's models are not here")
    request = showing("r", read_processor(FOUNDRY), 16, 192)
    [prompt], [items] = request.prompts, request.media
    text = load_config(FOUNDRY)["text_config"]
    assert len(prompt) + 1 <= text["max_position_embeddings"]
    assert len({item.digest for item in items}) == 16
    assert all(end - begin == item.layout.features for item in items for begin, end in item.runs)


def test_gaps_are_of_tokens_that_came_while_it_was_measured() -> None:
    readers: Any = [SimpleNamespace(times=[0.0, 1.0, 1.5, 4.0]), SimpleNamespace(times=[1.0, 3.0])]
    assert list(gaps(readers, 1.0, 3.0).found) == [500.0, 2000.0]


@pytest.mark.parametrize("tower", TOWERS)
def test_towers_can_be_had_with_fewer_layers(tower: str) -> None:
    assert config_of(tower, 1)["vision_config"] == {**config_of(tower)["vision_config"], "depth": 1}
