"""What is known of a loaded model outside of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.media.layout import MediaKind


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the rest of the program may know of the loaded model without touching mlx."""

    name: str
    source: str
    family: str  # the model_type of its config
    context: int
    vocab: int
    device: str
    dtype: str
    weight_bytes: int
    memory_budget: int
    max_sequences: int
    created: int  # unix time of loading
    notes: tuple[str, ...] = ()  # what is slower or different here than it could be
    recommended: Mapping[str, Any] = field(default_factory=dict, hash=False)  # how to generate, as its makers say
    quantization: str = ""  # what the weights are in the model's files, as people call it
    formats: str = ""  # that, and what activations and states are
    proposers: tuple[str, ...] = ()  # by whom tokens are guessed ahead, in the order in which they are asked
    kernels: str = ""  # what was compiled for the device, where that is ours to do
    sees: tuple[MediaKind, ...] = ()  # what it is shown besides text
    scorer: str = ""  # who scores long prompts, of which only what matters is computed when a request asks for it
    exact_context: int | None = None  # of requests for exact states, where others' are in fewer bits: memory holds less

    def context_of(self, *, exact: bool) -> int:
        return self.context if self.exact_context is None or not exact else self.exact_context
