"""Loading a LoRA adapter beside a model, and trying it: a layer that some family's code multiplies by in a way of its
own would not know of it."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from ingot.cache.forward_batch import ForwardPart
from ingot.errors import AdapterError
from ingot.models.adapter import ModelAdapter
from ingot.models.lora.weights import LoraWeights, read_lora

TRIAL_TOKENS = 3
"""Tokens."""


def load_lora(model: ModelAdapter, folder: Path, *, most_rank: int) -> LoraWeights:
    """Read an adapter and give it a slot, unless it has one. Raises AdapterError, and leaves the model as it was."""
    weights = read_lora(folder)
    if weights.rank > most_rank:
        raise AdapterError(f"Its rank is {weights.rank}, more than the {most_rank} that this server was started for.")
    if model.tower is not None and model.tower.bidirectional:
        raise AdapterError("Pictures' tokens of this model see each other, which adapters are not told of.")
    if weights.digest not in model.loras:
        model.loras.add(weights)
        try:
            _try_lora(model, weights.digest)
        except BaseException:
            model.loras.drop(weights.digest)
            raise
    return weights


def _try_lora(model: ModelAdapter, digest: str) -> None:
    rows = model.new_batch_state()
    row = rows.new(lora=model.loras.slot(digest))
    try:
        for tokens in (TRIAL_TOKENS, 1):
            mx.eval(model.run(rows, mx.zeros(tokens, mx.uint32), [ForwardPart((row,), tokens)]), rows.pending())
    except ValueError as error:
        raise AdapterError(f"This model cannot be adapted so: {error}.") from error
    finally:
        rows.leave(row)
    unused_lora_layers = model.loras.unused_lora_layers(digest)
    if unused_lora_layers:
        raise AdapterError(
            f"This model multiplies by {unused_lora_layers[0]} in a way of its own, which adapters cannot join."
        )
