"""Which models of the table of short names there is memory for, by task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ingot.engine.memory_budget import REWIND_SHARE, TRANSIENT_SHARE
from ingot.extras import missing_packages
from ingot.models.files.short_names import TASKS, NamedModel, Task, fitting_models

LEAST_CONTEXT: Final = 8192
"""Tokens that must fit next to a model's weights, or all that it was made for."""
MODELS_OF_A_TASK: Final = 4
ALONGSIDE_SHARE: Final = 3
"""A model that is served alongside a chat model has this part of the budget at most."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """`context` is what the memory budget leaves room for; 0: the model has none."""

    task: Task
    name: str
    hub_id: str
    parameters: float  # billions
    active: float
    download_bytes: int
    weight_bytes: int
    context: int
    command: str

    @classmethod
    def of(cls, model: NamedModel, task: Task, device: str, context: int) -> Recommendation:
        blind = " --text-only" if task in ("chat", "code") and lacks_extra_to_see(model) else ""
        return cls(
            *(task, model.name, model.hub_id, model.parameters, model.active),
            *(model.size, model.weight_bytes(device), context, f"ingot {TASKS[task][1]} {model.name}{blind}"),
        )


def lacks_extra_to_see(model: NamedModel) -> bool:
    """Whether a model with a vision tower is served for text alone, until an extra is installed."""
    from ingot.media.image_processors import PROCESSORS

    return "vision" in model.tasks and model.family in PROCESSORS and bool(missing_packages("vision"))


def recommend_models(budget: int, device: str) -> list[Recommendation]:
    """The best of each task that fit into `budget` bytes on a device of that kind."""
    found = []
    for task in TASKS:
        own = budget if task in ("chat", "code", "vision") else budget // ALONGSIDE_SHARE
        fitting = fitting_models(task, own, device, aside=TRANSIENT_SHARE + REWIND_SHARE, least_context=LEAST_CONTEXT)
        found += [Recommendation.of(model, task, device, context) for model, context in fitting[:MODELS_OF_A_TASK]]
    return found
