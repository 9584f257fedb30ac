"""From a folder to ears that the engine offers: what they are, what they take, and that they hear."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path

import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.config import Settings
from ingot.engine.engine import SideModels
from ingot.engine.loading.pooling_and_speech import BATCH_TOKENS, load_pooling_models, load_speech_to_text
from ingot.engine.speech_request import TranscriptEvent, TranscriptionEnded, TranscriptionRequest
from ingot.engine.speech_to_text import TranscriptionWorkload
from ingot.errors import ModelError
from ingot.kernels.device import current_device
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


def offered(folder: ModelFolder, free: int = 1 << 30) -> SideModels:
    return load_speech_to_text(folder, Settings(), current_device(), free)


def test_the_card_tells_what_the_model_hears(folder: ModelFolder) -> None:
    hearing = offered(folder)
    assert hearing.hearing is not None
    card = hearing.hearing.card
    assert (card.name, card.translates, card.context) == ("random-ears", True, 24) and "de" in card.languages
    assert hearing.taken > card.weight_bytes > 0


def test_a_model_that_does_not_fit_the_budget_is_refused(folder: ModelFolder) -> None:
    with pytest.raises(ModelError, match="memory budget are left"):
        offered(folder, free=1000)


def test_random_ears_come_to_an_end_too(folder: ModelFolder) -> None:
    hearing, mail = offered(folder), queue.SimpleQueue[Callable[[], None]]()
    desk = TranscriptionWorkload(hearing.hearing, mail.put, max_queue=1, target_ms=100.0)
    events: list[TranscriptEvent] = []
    desk.accept(TranscriptionRequest("a", AudioFile(wav(tone(2))), words=True), events.extend)
    while desk.status(0.0):
        desk.advance(0.0, lambda: False)
        while not (mail.empty() and (desk.busy or not desk.status(0.0))):
            mail.get(timeout=60)()
    desk.close()
    last = events[-1]
    assert isinstance(last, TranscriptionEnded) and last.seconds == 2.0
    assert hearing.hearing is not None and last.language in hearing.hearing.card.languages


POOLING = {"pooling_mode_cls_token": True}


def folder_of_start_encoders(path: Path) -> ModelFolder:
    return ModelFolder(path, path.name, "test")


def test_both_kinds_are_offered_with_what_they_take(tmp_path: Path) -> None:
    embedding = write_encoder(tmp_path / "vectors", "bert")
    write_sentence_files(embedding, POOLING)
    rerank = write_encoder(tmp_path / "scores", "xlm-roberta", head=True, pad_token_id=1)
    made = load_pooling_models(
        {"embedding": folder_of_start_encoders(embedding), "rerank": folder_of_start_encoders(rerank)},
        Settings(),
        current_device(),
        1 << 32,
    )
    vectors, scores = made.encoders["embedding"], made.encoders["rerank"]
    assert (vectors.card.name, vectors.card.dimension, vectors.card.length) == ("vectors", 16, 64)
    assert (scores.card.name, scores.card.dimension, scores.card.length) == ("scores", 1, 62)
    assert isinstance(vectors.inputs, TextInputs) and isinstance(scores.inputs, PairInputs)
    assert made.weights == vectors.card.weight_bytes + scores.card.weight_bytes > 0
    assert vectors.card.batch_tokens == BATCH_TOKENS and made.batch > 0 and made.notes == []


def test_without_any_nothing_is_taken() -> None:
    made = load_pooling_models({}, Settings(), current_device(), 0)
    assert (made.encoders, made.weights, made.batch, made.notes) == ({}, 0, 0, [])


def test_what_was_guessed_is_noted_under_the_models_name(tmp_path: Path) -> None:
    made = load_pooling_models(
        {"embedding": folder_of_start_encoders(write_encoder(tmp_path / "bare", "bert"))},
        Settings(),
        current_device(),
        1 << 32,
    )
    assert made.notes[0].startswith("bare: no modules.json")


def test_little_memory_makes_batches_smaller_then_inputs_shorter_then_is_refused(tmp_path: Path) -> None:
    path = write_encoder(tmp_path / "long", "bert", max_position_embeddings=8192)
    write_sentence_files(path, POOLING)
    whole = load_pooling_models({"embedding": folder_of_start_encoders(path)}, Settings(), current_device(), 1 << 32)
    assert whole.encoders["embedding"].card.length == 8192
    cut = load_pooling_models(
        {"embedding": folder_of_start_encoders(path)}, Settings(), current_device(), whole.weights + 3 * whole.batch
    )
    card = cut.encoders["embedding"].card
    assert 64 < card.length == card.batch_tokens < 8192
    assert f"inputs cut from 8192 to {card.length} tokens" in card.notes[-1]
    assert cut.batch <= 3 * whole.batch // 4
    with pytest.raises(ModelError, match="does not fit"):
        load_pooling_models(
            {"embedding": folder_of_start_encoders(path)}, Settings(), current_device(), whole.weights + 40_000
        )
    with pytest.raises(ModelError, match="Raise --memory"):
        load_pooling_models(
            {"embedding": folder_of_start_encoders(path)}, Settings(), current_device(), whole.weights // 2
        )


def test_a_decoder_judges_only_with_a_vocabulary_for_it(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = write_decoder(tmp_path / "judge", tied=True)
    words = {word: number for number, word in enumerate(["?", "yes", "no", "<|im_start|>", "<|im_end|>"])}
    made = Tokenizer(models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save(str(path / "tokenizer.json"))
    offered = load_pooling_models(
        {"rerank": folder_of_start_encoders(path)}, Settings(), current_device(), 1 << 32
    ).encoders["rerank"]
    assert isinstance(offered.inputs, JudgeInputs) and offered.card.dimension == 1
    poor = Tokenizer(models.WordLevel({"?": 0, "yes": 1, "no": 2}, unk_token="?"))
    poor.save(str(path / "tokenizer.json"))
    with pytest.raises(ModelError, match="im_start"):
        load_pooling_models({"rerank": folder_of_start_encoders(path)}, Settings(), current_device(), 1 << 32)
