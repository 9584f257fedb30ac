"""Models that do not generate (pooling, speech-to-text, text-to-speech), from their folders to what the engine
serves: alone (`start_side_engine`), or beside one that generates (`load_side_models`), within the memory that its
weights leave.

Loading runs on the engine thread. Raises ModelError, and ConfigError where an optional package is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from ingot.config import Settings
from ingot.engine.admission import EngineLimits
from ingot.engine.engine import ModelEngine, SideModels
from ingot.engine.loop import Loop
from ingot.engine.pooling_batches import ServedPoolingModel
from ingot.engine.request import PoolingModelCard, PoolingTask
from ingot.engine.speech_request import SpeechToTextCard, TextToSpeechCard
from ingot.engine.speech_to_text import ServedSpeechToText
from ingot.engine.text_to_speech import ServedTextToSpeech
from ingot.errors import ModelError
from ingot.extras import install_command, missing_packages, require_extra
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

ENCODERS: Final[tuple[PoolingTask, ...]] = ("embedding", "rerank")


BATCH_MEMORY_SHARE = 0.25
"""Beside a generating model, at most this part of what all weights leave is set aside for a batch."""


def start_side_engine(
    settings: Settings, kind: str, folder: ModelFolder, *, memory: int, loop: Loop, between: Callable[[], None]
) -> ModelEngine:
    """Load a model of this kind under the folder's name. `memory` are the bytes that it has, `loop` is the thread of
    all models, and `between` is called there after each piece of the load. Raises ModelError."""

    def load() -> SideModels:
        with loading_with_pauses(between):
            return load_beside({kind: folder}, settings, device.current_device(), memory, batch_share=1.0)

    return ModelEngine(load, EngineLimits(settings.max_sequences, settings.max_queue, settings.target_itl_ms), loop)


def load_beside(
    folders: Mapping[str, ModelFolder],
    settings: Settings,
    here: device.Device,
    free: int,
    batch_share: float = BATCH_MEMORY_SHARE,
) -> SideModels:
    """Load those of `folders`, by the kinds of models, that do not generate. Runs on the engine thread; `free` are the
    bytes that a generating model's weights leave. Raises ModelError."""
    encoders = {role: folders[role] for role in ENCODERS if role in folders}
    made = load_pooling_models(encoders, settings, here, free, batch_share)
    if "audio" in folders:
        made = _both(made, load_speech_to_text(folders["audio"], settings, here, free - made.taken))
    if "speech" in folders:
        made = _both(made, load_text_to_speech(folders["speech"], free - made.taken))
    return made


def _both(made: SideModels, other: SideModels) -> SideModels:
    return replace(
        made,
        hearing=made.hearing or other.hearing,
        speaking=made.speaking or other.speaking,
        weights=made.weights + other.weights,
        batch=made.batch + other.batch,
    )


BATCH_TOKENS = 4096
"""Tokens computed together, unless a single input may be longer: more would hardly be faster."""
SHORTEST_INPUT = 64
"""An encoder that cannot hold this many tokens in the budget is not worth loading."""


def load_pooling_models(
    folders: Mapping[PoolingTask, ModelFolder],
    settings: Settings,
    device: Device,
    free: int,
    batch_share: float = BATCH_MEMORY_SHARE,
) -> SideModels:
    """Load them. Runs on the engine thread; `free` are the bytes that other models' weights leave, of which
    `batch_share` may be set aside for a batch.

    Raises ModelError with what is wrong with one of them.
    """
    for folder in folders.values():
        _refuse_what_cannot_fit(folder, free)
    loaded = {role: _load_pooling_model(role, folder, settings, device) for role, folder in folders.items()}
    weights = sum(one.model.weight_bytes for one in loaded.values())
    if weights > free:
        raise ModelError(
            f"The encoders' weights take {_gb(weights)}, and {_gb(free)} of the memory budget are left for them. "
            "Raise --memory or choose smaller models."
        )
    allowed = int((free - weights) * batch_share)
    encoders = {role: one.offered(role, folders[role], allowed) for role, one in loaded.items()}
    batches = (loaded[role].model.batch_bytes(o.card.batch_tokens, o.card.length) for role, o in encoders.items())
    return SideModels(encoders, weights=weights, batch=max(batches, default=0))  # one runs at a time


@dataclass(frozen=True, slots=True)
class _LoadedPoolingModel:
    model: PoolingEncoder
    vocabulary: Vocabulary
    recipe: PoolingRecipe | None = None  # of one that makes vectors
    judging: bool = False

    def offered(self, role: PoolingTask, folder: ModelFolder, allowed: int) -> ServedPoolingModel:
        traits = self.model.traits
        batch = fitting_batch(self.model, allowed, max(traits.length, BATCH_TOKENS))
        if batch < min(SHORTEST_INPUT, traits.length):
            raise ModelError(
                f"{folder.name} does not fit: what is left of the memory budget holds {batch} of its tokens"
            )
        length = min(traits.length, batch)
        cut = f"inputs cut from {traits.length} to {length} tokens, which is what the memory budget holds"
        card = PoolingModelCard(
            role=role,
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
    role: PoolingTask, folder: ModelFolder, settings: Settings, device: Device
) -> _LoadedPoolingModel:
    vocabulary = load_encoder_vocabulary(folder.path)
    decoder = is_pooling_decoder(read_model_config(folder.path))
    if role == "embedding":
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


def _refuse_what_cannot_fit(folder: ModelFolder, free: int) -> None:
    size = sum(file.stat().st_size for file in folder.path.glob("model*.safetensors"))
    if size > free:
        raise ModelError(
            f"The weights of {folder.name} are {_gb(size)}, and {_gb(max(0, free))} of the memory budget are left for "
            "them. Raise --memory or choose a smaller model."
        )


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def load_speech_to_text(folder: ModelFolder, settings: Settings, device: Device, free: int) -> SideModels:
    """Load it. Runs on the engine thread; `free` are the bytes that other models leave. Raises ModelError, and
    ConfigError where sounds cannot be unpacked."""
    require_extra("audio", f"{folder.name}, which hears,")
    model = load_whisper(folder.path, device, dtype=settings.dtype)
    window = model.window_bytes + worker.header_pool.memory + worker.audio_pool.memory
    taken = model.weight_bytes + window
    if taken > free:
        raise ModelError(
            f"{folder.name} takes {taken / 1e9:.1f} GB with a window of sound, and {max(0, free) / 1e9:.1f} GB of the "
            "memory budget are left for it. Raise --memory or choose a smaller model."
        )
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
    offered = ServedSpeechToText(card, model.config.mels, vocabulary, model)
    return SideModels(hearing=offered, weights=model.weight_bytes, batch=window)


def load_text_to_speech(folder: ModelFolder, free: int) -> SideModels:
    """Load it. Runs on the engine thread; `free` are the bytes that other models leave. Raises ModelError."""
    model = load_kokoro(folder.path)
    taken = model.weight_bytes + model.config.piece_bytes
    if taken > free:
        raise ModelError(
            f"{folder.name} takes {taken / 1e9:.1f} GB with a piece of speech, and {max(0, free) / 1e9:.1f} GB of the "
            "memory budget are left for it. Raise --memory or choose a smaller model."
        )
    voices = tuple(voice for voice in model.voices if voice[:1] in ACCENT_BY_VOICE)
    if not voices:
        raise ModelError(f"{folder.name} has no voice that speaks English, which is what is pronounced here")
    preload_dictionaries({accent_of(voice) for voice in voices})
    notes = []
    if foreign := len(model.voices) - len(voices):
        notes.append(f"{foreign} voices of other languages are left out: English is what is pronounced here")
    if wanted := missing_packages("audio"):
        notes.append(f"speaks in wav and pcm alone; for mp3, the default, and others run {install_command(wanted)}")
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
    offered = ServedTextToSpeech(card, Phonemizer(model.phonemes, model.context), model)
    return SideModels(speaking=offered, weights=model.weight_bytes, batch=model.config.piece_bytes)
