"""Loading a LoRA adapter for a model, and trying it: some family's code may use a layer's weights without calling the
layer, which would leave the adapter out."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from ingot.cache.forward_batch import ForwardPart
from ingot.errors import AdapterError
from ingot.models.adapter import ModelAdapter
from ingot.models.lora.weights import LoraWeights, read_lora

TRIAL_TOKENS = 3


def load_lora(model: ModelAdapter, folder: Path, *, most_rank: int) -> LoraWeights:
    """Read an adapter and give it a slot, unless it has one. Raises AdapterError, and leaves the model as it was."""
    weights = read_lora(folder)
    if weights.rank > most_rank:
        raise AdapterError(f"Its rank is {weights.rank}, more than the {most_rank} that this server was started for.")
    if model.tower is not None and model.tower.bidirectional:
        raise AdapterError("Image tokens of this model see each other, which is not supported with adapters.")
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
    unused_layers = model.loras.unused_lora_layers(digest)
    if unused_layers:
        raise AdapterError(f"This model uses the weights of {unused_layers[0]} by code that adapters cannot extend.")
