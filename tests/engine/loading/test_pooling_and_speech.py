"""Encoders within a memory budget."""

from __future__ import annotations

from pathlib import Path

import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.config import Settings
from ingot.engine.loading.pooling_and_speech import BATCH_TOKENS, offer
from ingot.errors import ModelError
from ingot.kernels.device import current
from ingot.models.files.locate import ModelFolder
from ingot.text.tokenizer.encoder_inputs import JudgeInputs, PairInputs, TextInputs
from tests.encoders import write_encoder, write_sentence_files
from tests.models.pooling_models.test_encoders import write_decoder

POOLING = {"pooling_mode_cls_token": True}


def folder(path: Path) -> ModelFolder:
    return ModelFolder(path, path.name, "test")


def test_both_kinds_are_offered_with_what_they_take(tmp_path: Path) -> None:
    embedding = write_encoder(tmp_path / "vectors", "bert")
    write_sentence_files(embedding, POOLING)
    rerank = write_encoder(tmp_path / "scores", "xlm-roberta", head=True, pad_token_id=1)
    made = offer({"embedding": folder(embedding), "rerank": folder(rerank)}, Settings(), current(), 1 << 32)
    vectors, scores = made.encoders["embedding"], made.encoders["rerank"]
    assert (vectors.card.name, vectors.card.dimension, vectors.card.length) == ("vectors", 16, 64)
    assert (scores.card.name, scores.card.dimension, scores.card.length) == ("scores", 1, 62)
    assert isinstance(vectors.inputs, TextInputs) and isinstance(scores.inputs, PairInputs)
    assert made.weights == vectors.card.weight_bytes + scores.card.weight_bytes > 0
    assert vectors.card.batch_tokens == BATCH_TOKENS and made.batch > 0 and made.notes == []


def test_without_any_nothing_is_taken() -> None:
    made = offer({}, Settings(), current(), 0)
    assert (made.encoders, made.weights, made.batch, made.notes) == ({}, 0, 0, [])


def test_what_was_guessed_is_noted_under_the_models_name(tmp_path: Path) -> None:
    made = offer({"embedding": folder(write_encoder(tmp_path / "bare", "bert"))}, Settings(), current(), 1 << 32)
    assert made.notes[0].startswith("bare: no modules.json")


def test_little_memory_makes_batches_smaller_then_inputs_shorter_then_is_refused(tmp_path: Path) -> None:
    path = write_encoder(tmp_path / "long", "bert", max_position_embeddings=8192)
    write_sentence_files(path, POOLING)
    whole = offer({"embedding": folder(path)}, Settings(), current(), 1 << 32)
    assert whole.encoders["embedding"].card.length == 8192
    cut = offer({"embedding": folder(path)}, Settings(), current(), whole.weights + 3 * whole.batch)
    card = cut.encoders["embedding"].card
    assert 64 < card.length == card.batch_tokens < 8192
    assert f"inputs cut from 8192 to {card.length} tokens" in card.notes[-1]
    assert cut.batch <= 3 * whole.batch // 4
    with pytest.raises(ModelError, match="does not fit"):
        offer({"embedding": folder(path)}, Settings(), current(), whole.weights + 40_000)
    with pytest.raises(ModelError, match="Raise --memory"):
        offer({"embedding": folder(path)}, Settings(), current(), whole.weights // 2)


def test_a_decoder_judges_only_with_a_vocabulary_for_it(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = write_decoder(tmp_path / "judge", tied=True)
    words = {word: number for number, word in enumerate(["?", "yes", "no", "<|im_start|>", "<|im_end|>"])}
    made = Tokenizer(models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save(str(path / "tokenizer.json"))
    offered = offer({"rerank": folder(path)}, Settings(), current(), 1 << 32).encoders["rerank"]
    assert isinstance(offered.inputs, JudgeInputs) and offered.card.dimension == 1
    poor = Tokenizer(models.WordLevel({"?": 0, "yes": 1, "no": 2}, unk_token="?"))
    poor.save(str(path / "tokenizer.json"))
    with pytest.raises(ModelError, match="im_start"):
        offer({"rerank": folder(path)}, Settings(), current(), 1 << 32)
