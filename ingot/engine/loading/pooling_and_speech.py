"""From model folders to encoders that the engine offers, within the memory that the generating model leaves."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from ingot.config import Settings
from ingot.engine.encoder_request import EncoderCard, Role
from ingot.engine.pooling_batches import OfferedEncoder
from ingot.errors import ModelError
from ingot.kernels.device import Device
from ingot.models.files.locate import ModelFolder
from ingot.models.pooling_models.encoder import Encoder
from ingot.models.pooling_models.loading import is_decoder, load_embedder, load_reranker, read_config
from ingot.models.pooling_models.sentence_transformers import Recipe, read_recipe
from ingot.text.tokenizer.encoder_inputs import (
    JudgeInputs,
    PairInputs,
    RerankInputs,
    TextInputs,
    answer_tokens,
    load_vocabulary,
)
from ingot.text.tokenizer.vocabulary import Vocabulary

BATCH_TOKENS = 4096
"""Tokens computed together, unless a single input may be longer: more would hardly be faster."""
MEMORY_SHARE = 0.25
"""Beside a generating model, at most this part of what all weights leave is set aside for a batch."""
SHORTEST_INPUT = 64
"""An encoder that cannot hold this many tokens in the budget is not worth loading."""


@dataclass(frozen=True, slots=True)
class Offered:
    """The encoders, and what they take of the memory budget."""

    encoders: Mapping[Role, OfferedEncoder]
    weights: int = 0
    batch: int = 0  # while one runs; only one does at a time

    @property
    def notes(self) -> list[str]:
        return [f"{o.card.name}: {note}" for o in self.encoders.values() for note in o.card.notes]


def offer(
    folders: Mapping[Role, ModelFolder],
    settings: Settings,
    device: Device,
    free: int,
    batch_share: float = MEMORY_SHARE,
) -> Offered:
    """Load them. Runs on the engine thread; `free` are the bytes that other models' weights leave, of which
    `batch_share` may be set aside for a batch.

    Raises ModelError with what is wrong with one of them.
    """
    for folder in folders.values():
        _refuse_what_cannot_fit(folder, free)
    loaded = {role: _loaded(role, folder, settings, device) for role, folder in folders.items()}
    weights = sum(one.model.weight_bytes for one in loaded.values())
    if weights > free:
        raise ModelError(
            f"The encoders' weights take {_gb(weights)}, and {_gb(free)} of the memory budget are left for them. "
            "Raise --memory or choose smaller models."
        )
    allowed = int((free - weights) * batch_share)
    encoders = {role: one.offered(role, folders[role], allowed) for role, one in loaded.items()}
    batches = (loaded[role].model.batch_bytes(o.card.batch_tokens, o.card.length) for role, o in encoders.items())
    return Offered(encoders, weights, max(batches, default=0))


@dataclass(frozen=True, slots=True)
class _Loaded:
    model: Encoder
    vocabulary: Vocabulary
    recipe: Recipe | None = None  # of one that makes vectors
    judging: bool = False

    def offered(self, role: Role, folder: ModelFolder, allowed: int) -> OfferedEncoder:
        traits = self.model.traits
        batch = fitting(self.model, allowed, max(traits.length, BATCH_TOKENS))
        if batch < min(SHORTEST_INPUT, traits.length):
            raise ModelError(
                f"{folder.name} does not fit: what is left of the memory budget holds {batch} of its tokens"
            )
        length = min(traits.length, batch)
        cut = f"inputs cut from {traits.length} to {length} tokens, which is what the memory budget holds"
        card = EncoderCard(
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
        return OfferedEncoder(card, self._inputs(length), self.model)

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


def _loaded(role: Role, folder: ModelFolder, settings: Settings, device: Device) -> _Loaded:
    vocabulary = load_vocabulary(folder.path)
    decoder = is_decoder(read_config(folder.path))
    if role == "embedding":
        recipe = read_recipe(folder.path, usual="lasttoken" if decoder else "mean")
        return _Loaded(load_embedder(folder.path, device, recipe, dtype=settings.dtype), vocabulary, recipe)
    yes, no = answer_tokens(vocabulary) if decoder else (None, None)
    model = load_reranker(folder.path, device, yes=yes, no=no, dtype=settings.dtype)
    return _Loaded(model, vocabulary, judging=decoder)


def fitting(model: Encoder, allowed: int, wanted: int) -> int:
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
