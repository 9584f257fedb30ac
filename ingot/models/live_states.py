"""The live states that a model, or a head beside it, asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ingot.cache.attention_state import AppendState, parts_of, state_for
from ingot.cache.batch_state import Rows
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.footprint import EARLIER_BYTES
from ingot.cache.layer_state import LayerState
from ingot.errors import ModelError
from ingot.kernels.checked import CheckedKernels
from ingot.models.layers.attention import MixedAttention
from ingot.upstream import caches


def attends_natively(model: Any) -> bool:
    """Whether the native kernels read all keys and values that the model keeps."""
    covered = sum(isinstance(module, MixedAttention) and module.native for _, module in model.named_modules())
    return 0 < covered == sum(isinstance(state, AppendState) for state in new_rows(model, 0, None, None).states)


def new_rows(
    model: Any,
    margin: int,
    kept: mx.Dtype | None,
    kernels: CheckedKernels | None = None,
    most: int | None = None,
    token_bytes: Sequence[int] | None = None,
    head: Any = None,
    earlier: int = EARLIER_BYTES,
    live: PairCodec | None = None,
    coded_bytes: int = 0,
) -> Rows:
    """Live states of the kinds that the model, and a head beside it, ask for. Keys and values are rounded to `kept`, if
    that is given, and put into `live` behind the tail of a row."""
    layers = live_states(model, margin, kept, kernels)
    beside = [] if head is None else live_states(head, 0, kept, kernels)
    return Rows(layers, most, token_bytes, beside, earlier, live, coded_bytes)


def live_states(model: Any, margin: int, kept: mx.Dtype | None, kernels: CheckedKernels | None) -> list[LayerState]:
    """One for each cache that a model, or a head, asks for. Keys and values are rounded to `kept`, if that is given."""
    try:
        layers = [state_for(cache, margin) for cache in caches.make_prompt_cache(model)]
    except KeyError as error:
        kind = error.args[0].__name__
        raise ModelError(f"This model keeps state in a {kind}, which ingot does not know yet") from error
    for state in parts_of(layers):
        if isinstance(state, AppendState):
            state.kept, state.kernels = kept, kernels
    return layers
