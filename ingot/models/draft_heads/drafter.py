"""What all draft heads have in common, and those with a checkpoint of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from ingot.errors import ModelError
from ingot.models.adapter import ModelAdapter
from ingot.models.checkpoint import load_tensors
from ingot.models.draft_heads.checkpoint import path_of_layers, quantize_like
from ingot.models.draft_heads.draft_graph import DraftGraphs
from ingot.models.files.model_config import older_config_names
from ingot.models.layers.fused_layers import FusedLayers, SkippedLayer
from ingot.models.layers.lm_head import embedding_scale_of, lm_head_of, tap_hidden_states, token_embedding_of
from ingot.models.layers.modules import named_parameters
from ingot.upstream import load_config


class Drafter(nn.Module):
    """A draft head, which may compute with its model's embedding and output head, without owning them."""

    name = "draft"
    """What it is asked for by."""
    sees = False

    def __init__(self) -> None:
        super().__init__()
        self.shared: tuple[Any, Any] | None = None
        """Its model's embedding and output head."""
        self.graphs: DraftGraphs | None = None
        """What computes all draft tokens of a round at once, on CUDA."""
        self._embed: Callable[[mx.array], mx.array] | None = None
        self._output: Callable[[mx.array], mx.array] | None = None

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for _, array in named_parameters(self))

    def share(self, model: nn.Module, *, scaled: bool = True) -> None:
        """Look tokens up in the model's embedding, `scaled` as in the model, and compute logits by its output head.
        Raises ModelError where they are not known."""
        embedding, output = token_embedding_of(model), lm_head_of(model)
        if embedding is None or output is None:
            raise ModelError("This model cannot use a draft head: where it computes embeddings or logits is not known")
        self.share_modules(embedding, output, scale=embedding_scale_of(model) if scaled else 1.0)

    def share_modules(self, embedding: nn.Module, output: nn.Module, *, scale: float = 1.0) -> None:
        self.shared, lookup = (embedding, output), cast(Any, embedding)
        self._embed = lambda tokens: lookup(tokens) if scale == 1 else lookup(tokens) * scale
        self._output = logits_by(output)

    def shared_logits(self, hidden: mx.array) -> mx.array:
        assert self._output is not None, "a draft head is run without its model"
        return self._output(hidden)

    def embedded(self, tokens: mx.array) -> mx.array:
        assert self._embed is not None, "a draft head is run without its model"
        return self._embed(tokens)


def logits_by(output: Any) -> Callable[[mx.array], mx.array]:
    """What an output head, or an embedding that is one, makes of hidden states."""
    return output.as_linear if hasattr(output, "as_linear") else lambda hidden: output(hidden)


def read_drafter_config(folder: Path) -> dict[str, Any]:
    try:
        stated = load_config(folder)
    except (OSError, json.JSONDecodeError) as error:
        raise ModelError(f"{folder.name} has no readable config.json") from error
    return {**stated, **older_config_names(stated)}


def load_drafter_tensors(head: nn.Module, tensors: Mapping[str, mx.array], folder: Path) -> None:
    """Raises ModelError where they do not fit."""
    quantize_like(head, tensors)
    load_tensors(head, tensors, unneeded=(), whose=f"the draft head in {folder.name}")


def text_config_of(adapter: ModelAdapter) -> dict[str, Any]:
    return {**adapter.config, **(adapter.config.get("text_config") or {})}


def tap_layer_inputs(numbers: Sequence[Any], adapter: ModelAdapter) -> None:
    """The adapter hands over the inputs of these layers from now on; behind the last layer is the last norm's. Raises
    ModelError where the model has none of these numbers."""
    layers, path = adapter.model.layers, path_of_layers(adapter.model)
    if any(isinstance(layer, FusedLayers | SkippedLayer) for layer in layers):
        raise ModelError("The model's layers are fused into one operation: load it with separate layers")
    count = len(layers)
    if not numbers or not all(isinstance(number, int) and 0 <= number <= count for number in numbers):
        raise ModelError(f"The draft head reads the layers {list(numbers)}, and the model has {count}")
    assert adapter.selection is not None
    paths = [path.removesuffix("layers") + "norm" if number == count else f"{path}.{number}" for number in numbers]
    tap_hidden_states(adapter.model, paths, adapter.selection)
