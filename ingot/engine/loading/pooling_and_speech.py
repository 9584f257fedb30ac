"""Models that do not generate (pooling, speech-to-text, text-to-speech), from their folders to running engines.

Loading runs on the engine thread. Raises ModelError, and ConfigError where an optional package is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ingot.config import Settings
from ingot.engine.admission import EngineLimits
from ingot.engine.engine import PoolingEngine, SpeechToTextEngine, TextToSpeechEngine
from ingot.engine.loop import Loop
from ingot.engine.pooling import ServedPoolingModel
from ingot.engine.request import PoolingModelCard, PoolingTask
from ingot.engine.speech_request import SpeechToTextCard, TextToSpeechCard
from ingot.engine.speech_to_text import ServedSpeechToText
from ingot.engine.text_to_speech import ServedTextToSpeech
from ingot.errors import ModelError
from ingot.extras import extras_command, missing_packages, require_extra
from ingot.kernels import device
from ingot.kernels.device import Device
from ingot.media import worker
from ingot.models.checkpoint import loading_with_pauses
from ingot.models.files.locate import ModelFolder
from ingot.models.kokoro import load_kokoro
from ingot.models.pooling_models.encoder import PoolingEncoder
from ingot.models.pooling_models.loading import is_pooling_decoder, load_embedder, load_reranker, read_model_config
from ingot.models.pooling_models.sentence_transformers import PoolingRecipe, read_pooling_recipe
from ingot.models.whisper import load_whisper
from ingot.quantities import format_bytes
from ingot.text.speech.dictionary import preload_dictionaries
from ingot.text.speech.phonemizer import ACCENT_BY_VOICE, Phonemizer, accent_of
from ingot.text.tokenizer.encoder_inputs import (
    JudgeInputs,
    PairInputs,
    RerankInputs,
    TextInputs,
    answer_tokens,
    load_encoder_vocabulary,
)
from ingot.text.tokenizer.vocabulary import Vocabulary
from ingot.text.tokenizer.whisper import WhisperVocabulary

T = TypeVar("T")
BATCH_TOKENS = 4096
"""Tokens computed together, unless a single input may be longer: more would hardly be faster."""
SHORTEST_INPUT = 64
"""An encoder that cannot hold this many tokens in the budget is not worth loading."""


def start_pooling_engine(
    task: PoolingTask, settings: Settings, folder: ModelFolder, memory: int, loop: Loop, between: Callable[[], None]
) -> PoolingEngine:
    """Load the model under the folder's name. `memory` are the bytes that it has, `loop` is the thread of all models,
    and `between` is called there after each piece of the load. Raises ModelError."""
    load = partial(load_pooling_model, task, folder, settings, memory)
    return PoolingEngine(_with_pauses(between, load), EngineLimits.of(settings), loop)


start_embedding_engine = partial(start_pooling_engine, "embedding")
start_rerank_engine = partial(start_pooling_engine, "rerank")


def start_speech_to_text_engine(
    settings: Settings, folder: ModelFolder, memory: int, loop: Loop, between: Callable[[], None]
) -> SpeechToTextEngine:
    load = partial(load_speech_to_text, folder, settings, memory)
    return SpeechToTextEngine(_with_pauses(between, load), EngineLimits.of(settings), loop)


def start_text_to_speech_engine(
    settings: Settings, folder: ModelFolder, memory: int, loop: Loop, between: Callable[[], None]
) -> TextToSpeechEngine:
    load = partial(load_text_to_speech, folder, memory)
    return TextToSpeechEngine(_with_pauses(between, load), EngineLimits.of(settings), loop)


def _with_pauses(between: Callable[[], None], load: Callable[[], T]) -> Callable[[], T]:
    def loaded() -> T:
        with loading_with_pauses(between):
            return load()

    return partial(copy_context().run, loaded)  # which knows whom to tell of its steps


def load_pooling_model(task: PoolingTask, folder: ModelFolder, settings: Settings, memory: int) -> ServedPoolingModel:
    """Runs on the engine thread; `memory` are the bytes that it has. Raises ModelError."""
    _refuse_too_large(folder, sum(file.stat().st_size for file in folder.path.glob("model*.safetensors")), memory)
    loaded = _load_pooling_model(task, folder, settings, device.current_device())
    weights = loaded.model.weight_bytes
    _refuse_too_large(folder, weights, memory)
    return loaded.served(task, folder, memory - weights)


@dataclass(frozen=True, slots=True)
class _LoadedPoolingModel:
    model: PoolingEncoder
    vocabulary: Vocabulary
    recipe: PoolingRecipe | None = None  # of one that makes vectors
    judging: bool = False

    def served(self, task: PoolingTask, folder: ModelFolder, allowed: int) -> ServedPoolingModel:
        traits = self.model.traits
        batch = fitting_batch(self.model, allowed, max(traits.length, BATCH_TOKENS))
        if batch < min(SHORTEST_INPUT, traits.length):
            raise ModelError(
                f"{folder.name} does not fit: what is left of the memory budget holds {batch} of its tokens"
            )
        length = min(traits.length, batch)
        cut = f"inputs cut from {traits.length} to {length} tokens, which is what the memory budget holds"
        card = PoolingModelCard(
            role=task,
            name=folder.name,
            source=folder.source,
            family=traits.family,
            length=length,
            dimension=traits.dimension,
            unit=traits.unit,
            vocab=traits.vocab,
            dtype=self.model.dtype,
            weight_bytes=self.model.weight_bytes,
            batch_tokens=batch,
            created=int(time.time()),
            notes=(*traits.notes, *((cut,) if length < traits.length else ())),
        )
        return ServedPoolingModel(card, self._inputs(length), self.model)

    def _inputs(self, length: int) -> TextInputs | RerankInputs:
        if self.recipe is None:
            return (JudgeInputs if self.judging else PairInputs)(self.vocabulary, length=length)
        return TextInputs(
            self.vocabulary,
            length=length,
            lower_case=self.recipe.lower_case,
            prompts=self.recipe.prompts,
            default_prompt=self.recipe.default_prompt,
        )


def _load_pooling_model(
    task: PoolingTask, folder: ModelFolder, settings: Settings, device: Device
) -> _LoadedPoolingModel:
    vocabulary = load_encoder_vocabulary(folder.path)
    decoder = is_pooling_decoder(read_model_config(folder.path))
    if task == "embedding":
        recipe = read_pooling_recipe(folder.path, usual="lasttoken" if decoder else "mean")
        return _LoadedPoolingModel(load_embedder(folder.path, device, recipe, dtype=settings.dtype), vocabulary, recipe)
    yes, no = answer_tokens(vocabulary) if decoder else (None, None)
    model = load_reranker(folder.path, device, yes=yes, no=no, dtype=settings.dtype)
    return _LoadedPoolingModel(model, vocabulary, judging=decoder)


def fitting_batch(model: PoolingEncoder, allowed: int, wanted: int) -> int:
    """The most tokens of a batch, up to `wanted`, that take at most `allowed` bytes."""

    def fits(tokens: int) -> bool:
        return model.batch_bytes(tokens, min(tokens, model.traits.length)) <= allowed

    if fits(wanted):
        return wanted
    low, high = 0, wanted
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _refuse_too_large(folder: ModelFolder, needed: int, memory: int) -> None:
    if needed > memory:
        raise ModelError(
            f"{folder.name} takes {format_bytes(needed)}, and {format_bytes(max(0, memory))} of the memory budget are "
            "left for it. Raise --memory or choose a smaller model."
        )


def load_speech_to_text(folder: ModelFolder, settings: Settings, memory: int) -> ServedSpeechToText:
    """Runs on the engine thread; `memory` are the bytes that it has. Raises ModelError, and ConfigError where audio
    cannot be decoded."""
    require_extra("audio", f"{folder.name}, a speech-to-text model,")
    model = load_whisper(folder.path, device.current_device(), dtype=settings.dtype)
    window = model.window_bytes + worker.header_pool.memory + worker.audio_pool.memory
    _refuse_too_large(folder, model.weight_bytes + window, memory)
    vocabulary = WhisperVocabulary.load(folder.path, model.config.vocab)
    card = SpeechToTextCard(
        name=folder.name,
        source=folder.source,
        languages=tuple(vocabulary.languages) or ("en",),
        translates=vocabulary.multilingual,
        context=model.context,
        dtype=model.dtype,
        weight_bytes=model.weight_bytes,
        created=int(time.time()),
        notes=model.notes,
    )
    return ServedSpeechToText(card, model.config.mels, vocabulary, model)


def load_text_to_speech(folder: ModelFolder, memory: int) -> ServedTextToSpeech:
    """Runs on the engine thread; `memory` are the bytes that it has. Raises ModelError."""
    model = load_kokoro(folder.path)
    _refuse_too_large(folder, model.weight_bytes + model.config.piece_bytes, memory)
    voices = tuple(voice for voice in model.voices if voice[:1] in ACCENT_BY_VOICE)
    if not voices:
        raise ModelError(f"{folder.name} has no English voice; English is the one language that is spoken here")
    preload_dictionaries({accent_of(voice) for voice in voices})
    notes = []
    if foreign := len(model.voices) - len(voices):
        notes.append(f"{foreign} voices of other languages are left out: only English is spoken here")
    if missing_packages("audio"):
        notes.append(f"writes only wav and pcm; for mp3, the default, and other formats run {extras_command('audio')}")
    card = TextToSpeechCard(
        name=folder.name,
        source=folder.source,
        voices=voices,
        rate=model.rate,
        context=model.context,
        dtype=model.dtype,
        weight_bytes=model.weight_bytes,
        created=int(time.time()),
        notes=tuple(notes),
    )
    return ServedTextToSpeech(card, Phonemizer(model.phonemes, model.context), model)
