"""The head of a model that sees is given what the model is: features in place of placeholders, at their positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from ingot.engine.request import Ended
from ingot.media.image_processors import read_processor
from tests.engines import answer
from tests.models.vision.looking import IMAGE, VIDEO, looked, prompt_with, saved
from tests.seeing_engines import asked, start_seeing

pytest.importorskip("mlx_vlm")


class Watched:
    """A head, and what it was given for each token."""

    def __init__(self, head: Any) -> None:
        self._head = head
        self.tokens: list[int] = []
        self.features: dict[int, np.ndarray] = {}  # by the token's number among all that came
        self.positions: list[np.ndarray] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def __call__(self, hidden: mx.array, tokens: mx.array, cache: Any, visual: Any = None) -> mx.array:
        if visual is not None:
            for place, feature in zip(visual.indices.tolist(), np.array(visual.embeddings), strict=True):
                self.features[len(self.tokens) + place] = feature
        if len(self.tokens) == sum(each.shape[1] for each in self.positions) and cache.offset.at.ndim == 3:
            self.positions.append(np.array(cache.offset.at).reshape(3, -1))
        self.tokens += tokens.reshape(-1).tolist()
        given = {} if visual is None else {"visual": visual}
        found: mx.array = self._head(hidden, tokens, cache, **given)
        return found


def test_a_head_is_given_features_where_its_model_is_and_at_the_same_positions(tmp_path: Path) -> None:
    folder = saved("qwen3_5", tmp_path / "model")
    tokens, items = prompt_with(read_processor(folder), 3, ["image", "video"])
    engine = start_seeing(folder, headed=True, widest=16)
    try:
        heads = engine._workload._core.runner.heads
        assert heads is not None
        watched = Watched(heads.head)
        heads.head = watched
        assert isinstance(answer(engine, asked("shown", tokens, items))[-1], Ended)
        tower = engine._loaded.vision_encoder.tower  # type: ignore[union-attr]
        features = engine._loop.run(lambda: [np.array(looked(tower, item).embeddings) for item in items])
    finally:
        engine.close()
    indices = [place for item in items for run in item.runs for place in range(*run)]
    assert watched.tokens[: len(tokens)] == tokens and {tokens[place] for place in indices} == {IMAGE, VIDEO}
    assert sorted(watched.features) == indices
    found = np.stack([watched.features[place] for place in indices])
    assert np.abs(found - np.concatenate(features)).max() < 1e-5
    stated = tower.positions(len(tokens), items)
    before = np.concatenate([stated[:, :1], stated[:, :-1]], axis=1)  # each is made from the state of the one before it
    seen = np.concatenate(watched.positions, axis=1)
    assert seen.shape[1] >= indices[-1] and np.array_equal(seen[:, : len(tokens)], before[:, : seen.shape[1]])
