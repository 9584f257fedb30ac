"""Decode steps that are mostly found to need no read wait for the device once, instead of once a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np

from ingot.cache.attention_state import AppendState
from ingot.models.experts.guessing import FEW_TOKENS
from ingot.models.experts.slots import NOWHERE
from ingot.models.experts.streaming import ExpertStore, UncheckedChoice

LEARNING: Final = 0.1
"""How much of what is known of steps the last one makes up."""
MOSTLY: Final = 0.5
"""Steps are checked at their end where more than that found all experts in slots."""


class CheckedOnce:
    """A model whose decode steps are computed with the experts that are in slots, where these are likely to be all that
    are needed. What tokens have chosen is only looked at when a step was computed: unless all of it was there, it is
    computed again, layer by layer, while what was missing is being read. Keys and values are written to the same places
    then; steps with recurrent states, which move on, are computed layer by layer at once."""

    def __init__(self, model: Any, store: ExpertStore) -> None:
        self._model, self._store = model, store
        self._whole = 0.0  # the share of steps that needed no read: of late, on average

    @property
    def is_likely_whole(self) -> bool:
        """Whether the next step is likely to find all experts in slots."""
        return self._whole > MOSTLY

    def note(self, *, was_whole: bool) -> None:
        """Of a step, whether it found all of them there."""
        self._whole += LEARNING * (was_whole - self._whole)

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        store, before = self._store, self._store.reads
        if tokens.size > FEW_TOKENS or not all(isinstance(state, AppendState) for state in cache):
            return self._layer_by_layer(tokens, cache)
        if self.is_likely_whole:
            store.unchecked = []
            try:
                logits: mx.array = self._model(tokens, cache=cache)
            finally:
                choices, store.unchecked = store.unchecked, None
            if self.check(choices):
                self.note(was_whole=True)
                return logits
            mx.eval(logits)  # what it writes is written before it is written again
            store.repeats = True
        try:
            return self._layer_by_layer(tokens, cache)
        finally:
            store.repeats = False
            self.note(was_whole=store.reads == before)

    def _layer_by_layer(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        logits: mx.array = self._model(tokens, cache=cache)
        return logits

    def check(self, choices: Sequence[UncheckedChoice]) -> bool:
        """Whether all experts were there that a step has chosen; else they are being read."""
        mx.eval([each.chosen for each in choices])
        found = [(each, np.array(each.chosen)) for each in choices]
        missed = [(each.layer, chosen) for each, chosen in found if (each.slots[chosen] == NOWHERE).any()]
        for layer, chosen in missed:
            if layer.guesses:
                layer.read_ahead(chosen)
        if not missed:
            for each, chosen in found:
                each.layer.begin_missing(chosen, each.slots)
        return not missed
