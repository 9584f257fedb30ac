"""Pooling and speech-to-text models from their folders: what they are, and what they take."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path

import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.config import Settings
from ingot.engine.loading.pooling_and_speech import BATCH_TOKENS, load_pooling_model, load_speech_to_text
from ingot.engine.pooling import ServedPoolingModel
from ingot.engine.request import PoolingTask
from ingot.engine.speech_request import TranscriptEvent, TranscriptionEnded, TranscriptionRequest
from ingot.engine.speech_to_text import ServedSpeechToText, TranscriptionWorkload
from ingot.errors import ModelError
from ingot.media.audio import AudioFile
from ingot.models.files.locate import ModelFolder
from ingot.text.tokenizer.encoder_inputs import JudgeInputs, PairInputs, TextInputs
from tests.encoders import write_encoder, write_sentence_files
from tests.hearing import save_ears, tone, wav
from tests.models.pooling_models.test_encoders import write_decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = save_ears(tmp_path_factory.mktemp("random-ears"))
    return ModelFolder(path, "random-ears", "a test")


def loaded(folder: ModelFolder, memory: int = 1 << 30) -> ServedSpeechToText:
    return load_speech_to_text(folder, Settings(), memory)


def test_the_card_tells_what_the_model_transcribes(folder: ModelFolder) -> None:
    card = loaded(folder).card
    assert (card.name, card.translates, card.context) == ("random-ears", True, 24) and "de" in card.languages
    assert card.weight_bytes > 0


def test_a_model_that_does_not_fit_the_budget_is_refused(folder: ModelFolder) -> None:
    weights = loaded(folder).card.weight_bytes
    for memory in (1000, weights):  # a window of audio takes memory too
        with pytest.raises(ModelError, match="memory budget are left"):
            loaded(folder, memory)


def test_a_model_of_random_weights_comes_to_an_end_too(folder: ModelFolder) -> None:
    model, mail = loaded(folder), queue.SimpleQueue[Callable[[], None]]()
    workload = TranscriptionWorkload(model, mail.put, max_queue=1, target_ms=100.0)
    events: list[TranscriptEvent] = []
    workload.accept(TranscriptionRequest("a", AudioFile(wav(tone(2))), words=True), events.extend)
    while workload.status(0.0):
        workload.advance(0.0, lambda: False)
        while not (mail.empty() and (workload.busy or not workload.status(0.0))):
            mail.get(timeout=60)()
    workload.close()
    last = events[-1]
    assert isinstance(last, TranscriptionEnded) and last.seconds == 2.0
    assert last.language in model.card.languages


POOLING = {"pooling_mode_cls_token": True}


def pooling_model(task: PoolingTask, path: Path, memory: int = 1 << 32) -> ServedPoolingModel:
    return load_pooling_model(task, ModelFolder(path, path.name, "test"), Settings(), memory)


def test_an_embedding_model_reads_texts_and_a_reranker_pairs(tmp_path: Path) -> None:
    embedding = write_encoder(tmp_path / "vectors", "bert")
    write_sentence_files(embedding, POOLING)
    rerank = write_encoder(tmp_path / "scores", "xlm-roberta", head=True, pad_token_id=1)
    vectors, scores = pooling_model("embedding", embedding), pooling_model("rerank", rerank)
    assert (vectors.card.name, vectors.card.dimension, vectors.card.length) == ("vectors", 16, 64)
    assert (scores.card.name, scores.card.dimension, scores.card.length) == ("scores", 1, 62)
    assert isinstance(vectors.inputs, TextInputs) and isinstance(scores.inputs, PairInputs)
    assert vectors.card.batch_tokens == BATCH_TOKENS and vectors.card.notes == ()


def test_what_was_guessed_is_noted(tmp_path: Path) -> None:
    assert (
        pooling_model("embedding", write_encoder(tmp_path / "bare", "bert")).card.notes[0].startswith("no modules.json")
    )


def test_little_memory_makes_batches_smaller_then_inputs_shorter_then_is_refused(tmp_path: Path) -> None:
    path = write_encoder(tmp_path / "long", "bert", max_position_embeddings=8192)
    write_sentence_files(path, POOLING)
    whole = pooling_model("embedding", path)
    assert whole.card.length == 8192
    weights, batch = whole.card.weight_bytes, whole.model.batch_bytes(8192, 8192)  # type: ignore[attr-defined]
    card = pooling_model("embedding", path, weights + 3 * batch // 4).card
    assert 64 < card.length == card.batch_tokens < 8192
    assert f"inputs cut from 8192 to {card.length} tokens" in card.notes[-1]
    with pytest.raises(ModelError, match="does not fit"):
        pooling_model("embedding", path, weights + 10_000)
    with pytest.raises(ModelError, match="Raise --memory"):
        pooling_model("embedding", path, weights // 2)


def test_a_decoder_judges_only_with_a_vocabulary_for_it(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = write_decoder(tmp_path / "judge", tied=True)
    words = {word: number for number, word in enumerate(["?", "yes", "no", "<|im_start|>", "<|im_end|>"])}
    made = Tokenizer(models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save(str(path / "tokenizer.json"))
    judge = pooling_model("rerank", path)
    assert isinstance(judge.inputs, JudgeInputs) and judge.card.dimension == 1
    poor = Tokenizer(models.WordLevel({"?": 0, "yes": 1, "no": 2}, unk_token="?"))
    poor.save(str(path / "tokenizer.json"))
    with pytest.raises(ModelError, match="im_start"):
        pooling_model("rerank", path)
