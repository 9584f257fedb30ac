"""One forward pass of a model: tokens, live states and what is seen in, logits of selected tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import mlx.core as mx

from ingot.cache.batch_state import Rows
from ingot.cache.forward_batch import Part
from ingot.models.layers.deepstack import DeepStack
from ingot.models.layers.lm_head import Selection, embedding_of
from ingot.models.lora.layers import Blend
from ingot.models.steps import CompiledSteps
from ingot.models.vision.visual import Visual

Shown = tuple[Visual, DeepStack | None]
"""What a pass is shown, and the layers behind which some of it is added."""


def run(
    model: Any,
    selection: Selection | None,
    rows: Rows,
    tokens: mx.array,
    parts: Sequence[Part],
    at: Sequence[int] | None,
    *,
    mixed: bool,
    shown: Shown | None = None,
    blend: Blend | None = None,
) -> mx.array:
    """See `Adapter.run`. `model` may be its compiled steps, which give logits after all tokens, of no adapter's, alone.
    `blend` is told which adapters the rows go through."""
    count = 1 if mixed else len(parts[0].rows)
    chosen = None if at is None or len(at) == tokens.size else mx.array(list(at), dtype=mx.int32)[None]
    slots = [row.lora for part in parts for row in part.rows for _ in range(part.width)]
    if (chosen is not None or shown is not None or any(slots)) and isinstance(model, CompiledSteps):
        model = model.model
    asked = tokens.reshape(count, -1)
    with rows.launch(parts, mixed=mixed) as layers, nullcontext() if blend is None else blend.over(slots):
        if shown is None:
            logits = _selected(model, selection, asked, layers, chosen)
        else:
            logits = _shown(model, selection, asked, layers, chosen, *shown)
    return logits.reshape(-1, logits.shape[-1])


def _shown(
    model: Any,
    selection: Selection | None,
    tokens: mx.array,
    layers: Any,
    at: mx.array | None,
    visual: Visual,
    deep: DeepStack | None,
) -> mx.array:
    embed: Any = embedding_of(model)
    assert embed is not None, "a model that sees looks tokens up by a module that is known"
    with visual.behind(deep):
        seeing = partial(model, input_embeddings=visual.over(embed(tokens)))
        return _selected(seeing, selection, tokens, layers, at)


def _selected(model: Any, selection: Selection | None, tokens: mx.array, layers: Any, at: mx.array | None) -> mx.array:
    """Logits at the positions `at` [rows, n]."""
    if selection is None:
        return _at(model(tokens, cache=layers), at)
    selection.at = at
    try:
        return _at(model(tokens, cache=layers), at)
    finally:
        selection.at = None


def _at(logits: mx.array, positions: mx.array | None) -> mx.array:
    """The logits at `positions`, where the output head has not computed just those."""
    if positions is None or logits.shape[1] == positions.shape[1]:
        return logits
    return mx.take_along_axis(logits, positions[..., None], axis=1)
