"""The shipped cross-encoder, without torch, and against transformers where it is there."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from foundry.package import MODELS
from foundry.rerank.evaluate import ranking
from foundry.rerank.lessons import search
from foundry.rerank.scores import CrossEncoder
from foundry.rerank.shape import config, tokenizer_config

FOLDER = MODELS / "rerank"


@pytest.fixture(scope="module")
def model() -> CrossEncoder:
    return CrossEncoder(FOLDER)


def test_it_ranks_the_right_passage_first_and_tells_right_from_wrong(model: CrossEncoder) -> None:
    figures = ranking(model, range(16))
    assert figures["first"] >= 0.9
    assert figures["pairs"] >= 0.95


def test_a_score_does_not_depend_on_the_other_passages(model: CrossEncoder) -> None:
    asked = search(1, held_out=True)
    alone = [float(model.scores(asked.query, [passage])[0]) for passage in asked.passages]
    assert np.allclose(model.scores(asked.query, asked.passages), alone, atol=1e-4)


def test_it_ships_with_its_configuration() -> None:
    assert json.loads((FOLDER / "config.json").read_text()) == config()
    assert json.loads((FOLDER / "tokenizer_config.json").read_text()) == tokenizer_config()


def test_its_word_list_is_its_tokenizers() -> None:
    words = json.loads((FOLDER / "tokenizer.json").read_text())["model"]["vocab"]
    listed = (FOLDER / "vocab.txt").read_text().splitlines()
    assert {word: number for number, word in enumerate(listed)} == words


@pytest.mark.oracle
def test_scores_agree_with_transformers(model: CrossEncoder) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(FOLDER)
    oracle: Any = AutoModelForSequenceClassification.from_pretrained(FOLDER, dtype=torch.float32).eval()
    for seed in range(6):
        asked = search(seed, held_out=True)
        pairs = ([asked.query] * len(asked.passages), asked.passages)
        with torch.no_grad():
            expected = oracle(**tokenizer(*pairs, padding=True, truncation=True, return_tensors="pt")).logits[:, 0]
        found = model.scores(asked.query, asked.passages)
        assert np.linalg.norm(found - expected.numpy()) / np.linalg.norm(expected.numpy()) < 0.01
