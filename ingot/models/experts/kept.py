"""Slots that outlive their model: one that was unloaded comes back without reading what is still there.

They take memory that no loaded model has a claim to, and are given up as soon as one has. A model comes back to its
slots if its files are those of before and its setting gives it as many.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ingot.models.experts.slots import ExpertSlots
from ingot.models.experts.weights import SlotWeights


@dataclass(frozen=True, slots=True)
class KeptLayer:
    products: Any
    slots: ExpertSlots
    weights: SlotWeights


@dataclass(frozen=True, slots=True)
class _KeptModel:
    folder: Path
    layers: list[KeptLayer]
    nbytes: int


class KeptExperts:
    """Only the engine thread may use it."""

    def __init__(self) -> None:
        self.room = 0
        """Bytes that slots may take whose models are not loaded. Nothing is kept until somebody says so."""
        self._models: dict[Hashable, _KeptModel] = {}

    @property
    def nbytes(self) -> int:
        return sum(model.nbytes for model in self._models.values())

    def put(self, form: Hashable, folder: Path, layers: list[KeptLayer]) -> None:
        """The slots of a model that goes; those that were put here first make room."""
        nbytes = sum(layer.weights.nbytes for layer in layers)
        if nbytes <= self.room:
            self._models.pop(form, None)
            self.make_room(self.room - nbytes)
            self._models[form] = _KeptModel(folder, layers, nbytes)

    def take(self, form: Hashable) -> list[KeptLayer] | None:
        kept = self._models.pop(form, None)
        return None if kept is None else kept.layers

    def make_room(self, most: int, but: Path | None = None) -> None:
        """Keep at most so many bytes, besides those of the model in that folder, which comes back."""
        others = {form: model for form, model in self._models.items() if model.folder != but}
        left = sum(model.nbytes for model in others.values())
        for form, model in others.items():
            if left <= max(0, most):
                break
            del self._models[form]
            left -= model.nbytes


KEPT: Final = KeptExperts()
"""Of this process, whose models share the engine thread."""
