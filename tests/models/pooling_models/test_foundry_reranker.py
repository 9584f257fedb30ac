"""The cross-encoder that the foundry ships, as the server reads and runs it, against the foundry's own plain code."""

from __future__ import annotations

import numpy as np
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from foundry.package import MODELS
from ingot.config import Settings
from ingot.engine.loading.pooling_and_speech import load_pooling_model
from ingot.models.files.locate import ModelFolder
from ingot.text.tokenizer.encoder_inputs import PairInputs
from tests.models.pooling_models.running import finished

FOLDER = MODELS / "rerank"
SEARCHES = 12

pytestmark = pytest.mark.skipif(not (FOLDER / "model.safetensors").is_file(), reason="the foundry has not made it yet")


def test_it_scores_as_the_foundrys_own_code_does_and_mostly_finds_the_right_passage() -> None:
    from foundry.rerank.lessons import search
    from foundry.rerank.scores import CrossEncoder

    loaded = load_pooling_model("rerank", ModelFolder(FOLDER, "rerank", "foundry"), Settings(), 1 << 30)
    inputs, model = loaded.inputs, loaded.model
    assert isinstance(inputs, PairInputs)
    plain = CrossEncoder(FOLDER)
    first = 0
    for seed in range(SEARCHES):
        question = search(seed, held_out=True)
        pieces = inputs.read(question.query, question.passages, truncate=True)
        found = finished(model, [p.tokens for p in pieces], [p.types for p in pieces])[:, 0]  # type: ignore[arg-type]
        assert found == pytest.approx(plain.scores(question.query, list(question.passages)), abs=1e-3)
        first += int(np.argmax(found)) == 0
    assert first >= SEARCHES * 0.6
